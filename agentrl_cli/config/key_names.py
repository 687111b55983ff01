"""What the keys of AReaL, verl and TRL are called here, for who brings a configuration along.

docs/coming-from.md is made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: AReaL (May 2026): key to what stands for it here. Keys that have the same name are left out.
AREAL = {
    "total_train_epochs": "train.total_steps (steps: epochs x rows / train_dataset.batch_size)",
    "total_train_steps": "train.total_steps",
    "allocation_mode": "engine.kind, engine.num_servers, engine.tensor_parallel_size",
    "cluster.fileroot": "output_dir",
    "cluster.n_gpus_per_node": "nothing to set: the GPUs that CUDA_VISIBLE_DEVICES shows are used",
    "scheduler.type": "launcher.kind",
    "gconfig.max_new_tokens": "gconfig.max_tokens",
    "gconfig.greedy": "gconfig.temperature (0: greedy, for evaluations)",
    "eval_gconfig.max_new_tokens": "eval_gconfig.max_tokens",
    "eval_gconfig.greedy": "eval_gconfig.temperature (0: greedy)",
    "rollout.backend": "engine.kind, engine.num_servers, engine.tensor_parallel_size",
    "rollout.max_concurrent_rollouts": "rollout.max_concurrent",
    "rollout.max_head_offpolicyness": "rollout.max_staleness",
    "rollout.consumer_batch_size": "train_dataset.batch_size",
    "rollout.dump_to_file": "nothing to set: every trajectory is stored",
    "rollout.request_timeout": "engine.generate_timeout_seconds",
    "rollout.setup_timeout": "engine.start_timeout_seconds",
    "rollout.agent.agent_cls_path": "agent_builder_path",
    "rollout.agent.mode": "rollout.agent_mode (inline; subproc: subprocess; online: external)",
    "rollout.agent.tool_call_parser": "engine.tool_call_parser",
    "rollout.agent.reasoning_parser": "engine.reasoning_parser",
    "rollout.agent.engine_max_tokens": "engine.max_model_len",
    "rollout.agent.turn_discount": "rollout.turn_discount",
    "rollout.agent.export_style": "rollout.export_style",
    "rollout.agent.subproc_max_workers": "rollout.subprocess.max_processes",
    "rollout.agent.session_timeout_seconds": "rollout.external.idle_timeout_seconds",
    "actor.path": "model.path",
    "actor.dtype": "model.dtype",
    "actor.backend": "train.num_processes",
    "actor.gradient_checkpointing": "train.gradient_checkpointing",
    "actor.mb_spec.max_tokens_per_mb": "train.micro_batch_tokens",
    "actor.optimizer.lr": "train.learning_rate",
    "actor.optimizer.weight_decay": "train.weight_decay",
    "actor.optimizer.beta1": "train.adam_beta1",
    "actor.optimizer.beta2": "train.adam_beta2",
    "actor.optimizer.eps": "train.adam_epsilon",
    "actor.optimizer.lr_scheduler_type": "train.learning_rate_schedule",
    "actor.optimizer.min_lr_ratio": "train.min_learning_rate (a rate, not a share)",
    "actor.optimizer.gradient_clipping": "train.max_grad_norm",
    "actor.optimizer.warmup_steps_proportion": "train.warmup_steps (steps, not a share)",
    "actor.use_lora": "model.lora",
    "actor.lora_rank": "model.lora.rank",
    "actor.lora_alpha": "model.lora.alpha",
    "actor.target_modules": "model.lora.target_modules",
    "actor.ppo_n_minibatches": "train.num_minibatches",
    "actor.eps_clip": "train.algorithm.loss.clip_low, train.algorithm.loss.clip_high",
    "actor.eps_clip_higher": "train.algorithm.loss.clip_high",
    "actor.c_clip": "train.algorithm.loss.dual_clip",
    "actor.group_size": "gconfig.n_samples",
    "actor.temperature": "gconfig.temperature",
    "actor.max_new_tokens": "gconfig.max_tokens",
    "actor.reward_norm": "train.algorithm.advantage.kind (grpo: mean and deviation of the group)",
    "actor.adv_norm": "train.algorithm.advantage.normalization (gae alone)",
    "actor.reward_scaling": "nothing to set: scale in the reward function",
    "actor.reward_bias": "nothing to set: add it in the reward function",
    "actor.reward_clip": "nothing to set: clip in the reward function",
    "actor.overlong_reward_penalty": "train.algorithm.overlong",
    "actor.overlong_tokens": "train.algorithm.overlong.buffer_tokens",
    "actor.overlong_penalty_factor": "train.algorithm.overlong.coef",
    "actor.discount": "train.algorithm.advantage.discount",
    "actor.gae_lambda": "train.algorithm.advantage.gae_lambda",
    "actor.kl_ctl": "train.algorithm.kl.coef (train.algorithm.kl.place: reward)",
    "actor.kl_estimator": "train.algorithm.kl.estimator",
    "actor.use_sapo_loss": "train.algorithm.kind (sapo)",
    "actor.sapo_tau_pos": "train.algorithm.loss.positive_temperature",
    "actor.sapo_tau_neg": "train.algorithm.loss.negative_temperature",
    "actor.importance_sampling_level": "train.algorithm.kind (sequence: gspo)",
    "actor.use_decoupled_loss": "train.algorithm.loss.kind (decoupled_ppo, the default; ppo_clip)",
    "actor.recompute_logprob": "train.algorithm.loss.kind (decoupled_ppo recomputes them)",
    "actor.rejection_sampling.upper": "train.algorithm.rollout_correction.cap",
    "actor.rejection_sampling.lower": "train.algorithm.rollout_correction.floor",
    "actor.rejection_sampling.action": "train.algorithm.rollout_correction.mode",
    "actor.rejection_sampling.level": (
        "train.algorithm.rollout_correction.level (newest tokens too: on_policy_logprobs: rollout)"
    ),
    "actor.weight_update_mode": "engine.weight_transfer.kind (xccl: nccl; disk)",
    "actor.enable_tree_training": "train.packing (prefix_tree, the default)",
    "ref.path": "nothing to set: with train.algorithm.kl, the start weights are the reference",
    "critic.path": "train.critic.path",
    "critic.optimizer.lr": "train.critic.learning_rate",
    "critic.eps_clip": "train.critic.clip_range",
    "sglang.model_path": "model.path",
    "sglang.context_length": "engine.max_model_len",
    "sglang.mem_fraction_static": "engine.gpu_memory_utilization",
    "sglang.max_running_requests": "engine.max_num_seqs",
    "vllm.model": "model.path",
    "vllm.max_model_len": "engine.max_model_len",
    "vllm.max_num_seqs": "engine.max_num_seqs",
    "vllm.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "train_dataset.max_length": "engine.max_model_len (of prompt and completion)",
    "train_dataset.type": "nothing to set: rows are tasks for the agent",
    "saver.freq_steps": "train.save_every_steps",
    "saver.freq_epochs": "train.save_every_steps (in steps)",
    "evaluator.freq_steps": "train.eval_every_steps",
    "evaluator.freq_epochs": "train.eval_every_steps (in steps)",
    "recover.mode": "nothing to set: the same command resumes a run",
    "stats_logger.wandb": "loggers (kind: wandb)",
    "stats_logger.wandb.project": "loggers.0.project",
    "stats_logger.tensorboard": "loggers (kind: tensorboard)",
}

#: verl (January 2026), likewise.
VERL = {
    "data.train_files": "train_dataset.path",
    "data.val_files": "valid_dataset.path",
    "data.train_max_samples": "train_dataset.limit",
    "data.val_max_samples": "valid_dataset.limit",
    "data.train_batch_size": "train_dataset.batch_size",
    "data.max_prompt_length": "engine.max_model_len (of prompt and completion)",
    "data.max_response_length": "gconfig.max_tokens (a call), rollout.max_tokens_per_trajectory",
    "data.shuffle": "train_dataset.shuffle",
    "data.seed": "seed",
    "data.prompt_key": "nothing to set: the agent reads the row's fields",
    "data.reward_fn_key": "nothing to set: the reward function names the row's fields it needs",
    "data.tool_config_path": "agent_builder_path (an agent has its tools)",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.tokenizer_path": "tokenizer_path",
    "actor_rollout_ref.model.custom_chat_template": "model.chat_template",
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": "model.lora.target_modules",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "train.gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": "nothing to set: samples are always packed",
    "actor_rollout_ref.actor.optim.lr": "train.learning_rate",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "train.warmup_steps",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "train.warmup_steps (steps)",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "train.learning_rate_schedule",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "train.min_learning_rate (a rate)",
    "actor_rollout_ref.actor.optim.weight_decay": "train.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "train.adam_beta1, train.adam_beta2",
    "actor_rollout_ref.actor.optim.clip_grad": "train.max_grad_norm",
    "actor_rollout_ref.actor.grad_clip": "train.max_grad_norm",
    "actor_rollout_ref.actor.ppo_mini_batch_size": (
        "train.num_minibatches (their number: train_dataset.batch_size / ppo_mini_batch_size)"
    ),
    "actor_rollout_ref.actor.ppo_epochs": "train.num_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "train.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "train.micro_batch_tokens (in tokens)",
    "actor_rollout_ref.actor.use_dynamic_bsz": "nothing to set: micro-batches are cut by tokens",
    "actor_rollout_ref.actor.clip_ratio": (
        "train.algorithm.loss.clip_low, train.algorithm.loss.clip_high"
    ),
    "actor_rollout_ref.actor.clip_ratio_low": "train.algorithm.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "train.algorithm.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "train.algorithm.loss.dual_clip",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "train.algorithm.loss.kind",
    "actor_rollout_ref.actor.loss_agg_mode": "train.algorithm.aggregation",
    "actor_rollout_ref.actor.loss_scale_factor": "train.algorithm.constant_denominator",
    "actor_rollout_ref.actor.entropy_coeff": "train.algorithm.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": "train.algorithm.kl (place: loss)",
    "actor_rollout_ref.actor.kl_loss_coef": "train.algorithm.kl.coef",
    "actor_rollout_ref.actor.kl_loss_type": "train.algorithm.kl.estimator (low_var_kl: k3)",
    "actor_rollout_ref.actor.tau_pos": "train.algorithm.loss.positive_temperature",
    "actor_rollout_ref.actor.tau_neg": "train.algorithm.loss.negative_temperature",
    "actor_rollout_ref.rollout.name": "engine.kind",
    "actor_rollout_ref.rollout.n": "gconfig.n_samples",
    "actor_rollout_ref.rollout.temperature": "gconfig.temperature",
    "actor_rollout_ref.rollout.top_p": "gconfig.top_p",
    "actor_rollout_ref.rollout.response_length": "gconfig.max_tokens",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "engine.tensor_parallel_size",
    "actor_rollout_ref.rollout.data_parallel_size": "engine.num_servers",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "engine.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_model_len": "engine.max_model_len",
    "actor_rollout_ref.rollout.max_num_seqs": "engine.max_num_seqs",
    "actor_rollout_ref.rollout.engine_kwargs": "engine.server_args",
    "actor_rollout_ref.rollout.val_kwargs.n": "eval_gconfig.n_samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "eval_gconfig.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "eval_gconfig.top_p",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "eval_gconfig.temperature (0: greedy)",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "actor_rollout_ref.rollout.multi_turn.format": "engine.tool_call_parser",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": (
        "agent_builder_path (an agent has its tools)"
    ),
    "actor_rollout_ref.rollout.agent.num_workers": "rollout.num_workers",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agent_builder_path",
    "actor_rollout_ref.rollout.calculate_log_probs": "nothing to set: they are always recorded",
    "algorithm.adv_estimator": "train.algorithm.kind (gae: ppo)",
    "algorithm.gamma": "train.algorithm.advantage.discount",
    "algorithm.lam": "train.algorithm.advantage.gae_lambda",
    "algorithm.norm_adv_by_std_in_grpo": "train.algorithm.kind (false: dr_grpo)",
    "algorithm.use_kl_in_reward": "train.algorithm.kl (place: reward)",
    "algorithm.kl_ctrl.kl_coef": "train.algorithm.kl.coef",
    "algorithm.rollout_correction.rollout_is": (
        "train.algorithm.rollout_correction.level (newest tokens too: on_policy_logprobs: rollout)"
    ),
    "algorithm.rollout_correction.rollout_is_threshold": "train.algorithm.rollout_correction.cap",
    "critic.model.path": "train.critic.path",
    "critic.optim.lr": "train.critic.learning_rate",
    "critic.cliprange_value": "train.critic.clip_range",
    "custom_reward_function.path": "reward_fn_path (path/to/file.py:name)",
    "custom_reward_function.name": "reward_fn_path (path/to/file.py:name)",
    "trainer.project_name": "experiment_name",
    "trainer.experiment_name": "trial_name",
    "trainer.logger": "loggers",
    "trainer.total_training_steps": "train.total_steps",
    "trainer.total_epochs": ("train.total_steps (steps: epochs x rows / train_dataset.batch_size)"),
    "trainer.save_freq": "train.save_every_steps",
    "trainer.test_freq": "train.eval_every_steps",
    "trainer.val_before_train": "valid_dataset (evaluated before the first step)",
    "trainer.critic_warmup": "train.critic.warmup_steps",
    "trainer.default_local_dir": "output_dir",
    "trainer.max_actor_ckpt_to_keep": "train.keep_last_checkpoints",
    "trainer.n_gpus_per_node": "nothing to set: the GPUs that CUDA_VISIBLE_DEVICES shows are used",
    "trainer.resume_mode": "nothing to set: the same command resumes a run",
}

#: The GRPOTrainer of TRL 1.16 and its GRPOConfig, likewise.
TRL = {
    "model": "model.path",
    "model_init_kwargs": "model.dtype",
    "chat_template_kwargs": "model.chat_template",
    "reward_funcs": "reward_fn_path (one function, which may return named parts)",
    "reward_weights": "nothing to set: weigh the parts in the reward function",
    "tools": "agent_builder_path (an agent has its tools)",
    "rollout_func": "agent_builder_path, workflow_path",
    "environment_factory": "agent_builder_path (an agent has its environment)",
    "max_tool_calling_iterations": "rollout.max_turns",
    "eval_dataset": "valid_dataset",
    "peft_config": "model.lora",
    "num_generations": "gconfig.n_samples",
    "num_generations_eval": "eval_gconfig.n_samples",
    "max_completion_length": "gconfig.max_tokens (a call), rollout.max_tokens_per_trajectory",
    "temperature": "gconfig.temperature",
    "top_p": "gconfig.top_p",
    "shuffle_dataset": "train_dataset.shuffle",
    "generation_batch_size": (
        "train_dataset.batch_size (in tasks: generation_batch_size / num_generations)"
    ),
    "steps_per_generation": "train.num_minibatches",
    "num_iterations": "train.num_epochs",
    "max_steps": (
        "train.total_steps (max_steps counts updates: steps_per_generation x num_iterations a step)"
    ),
    "num_train_epochs": "train.total_steps (steps: epochs x rows / train_dataset.batch_size)",
    "per_device_train_batch_size": "train.micro_batch_tokens (in tokens)",
    "gradient_accumulation_steps": "nothing to set: micro-batches are cut by tokens",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.learning_rate_schedule",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
    "adam_beta1": "train.adam_beta1",
    "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_epsilon",
    "max_grad_norm": "train.max_grad_norm",
    "beta": "train.algorithm.kl.coef (train.algorithm.kl.place: loss; 0 in both by default)",
    "epsilon": "train.algorithm.loss.clip_low, train.algorithm.loss.clip_high",
    "epsilon_high": "train.algorithm.loss.clip_high",
    "delta": "train.algorithm.loss.dual_clip (for negative advantages)",
    "loss_type": (
        "train.algorithm.aggregation (dapo: token_mean; grpo: sequence_mean; dr_grpo: constant), "
        "train.algorithm.kind (cispo, sapo)"
    ),
    "scale_rewards": "train.algorithm.advantage.kind (group: grpo; none: dr_grpo)",
    "importance_sampling_level": "train.algorithm.kind (sequence: gspo)",
    "sapo_temperature_pos": "train.algorithm.loss.positive_temperature",
    "sapo_temperature_neg": "train.algorithm.loss.negative_temperature",
    "entropy_coef": "train.algorithm.entropy_coef",
    "vllm_importance_sampling_correction": "train.algorithm.rollout_correction",
    "vllm_importance_sampling_mode": (
        "train.algorithm.rollout_correction.mode, train.algorithm.rollout_correction.level"
    ),
    "vllm_importance_sampling_clip_max": "train.algorithm.rollout_correction.cap",
    "vllm_importance_sampling_clip_min": "train.algorithm.rollout_correction.floor",
    "use_vllm": "engine.kind (vllm)",
    "vllm_mode": "nothing to set: servers are started, on GPUs of their own or beside the trainer",
    "vllm_server_base_url": "nothing to set: servers are started by the command",
    "vllm_tensor_parallel_size": "engine.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_max_model_length": "engine.max_model_len",
    "log_completions": "nothing to set: every trajectory is stored",
    "report_to": "loggers",
    "save_steps": "train.save_every_steps",
    "save_total_limit": "train.keep_last_checkpoints",
    "eval_steps": "train.eval_every_steps",
    "output_dir": "output_dir",
    "run_name": "trial_name",
    "resume_from_checkpoint": "nothing to set: the same command resumes a run",
}

_ALL = (*AREAL.items(), *VERL.items(), *TRL.items())


def describe_foreign_key(key: str, value: Any) -> str | None:
    """What stands here for an unknown key, and for those in it where it is a section; None: it is
    none of these trainers'."""
    found = [
        f"{path} -> {' or '.join(meanings)}"
        for path in _list_paths(key, value)
        if (meanings := _find_meanings(path))
    ]
    if not found:
        return None
    return f"known from AReaL, verl or TRL (docs/coming-from.md): {'; '.join(found)}"


def _list_paths(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _list_paths(f"{key}.{name}", inner)
    else:
        yield key


def _find_meanings(path: str) -> list[str]:
    """Of the keys that end as ``path`` does, the longest way back; none where that says little."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        ending = "." + ".".join(names[-length:])
        meanings = {m: None for k, m in _ALL if f".{k}".endswith(ending)}
        if meanings:
            # A name such as ``path`` is that of many things.
            return list(meanings) if len(meanings) <= 2 else []
    return []
