"""The configuration of ``agentrl train`` and ``agentrl eval``: one class per section."""

from __future__ import annotations

import importlib.util
import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from agentrl_cli.config.alarms import AlarmsConfig
from agentrl_cli.config.algorithm import AlgorithmConfig
from agentrl_cli.config.algorithm_check import check_algorithm
from agentrl_cli.config.base import StrictConfig
from agentrl_cli.config.cores import count_usable_cores
from agentrl_cli.config.critic import CriticConfig
from agentrl_cli.config.curriculum import (
    ReplaceGroupsConfig,
    RestTasksConfig,
    check_groups_are_compared,
)
from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.errors import ConfigError, MissingExtraError

#: Workers cost little but memory while they wait for the model.
_WORKERS_PER_CORE = 8

#: One path segment: experiments and trials become folder names.
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._\-]*$", max_length=120)]


class LoraConfig(StrictConfig):
    """Low-rank adapters (arXiv 2106.09685): they are trained, the model itself stays as it is."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0.0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] | Literal["all-linear"] = (
        "all-linear"
    )
    """Names of the layers that get an adapter; ``all-linear``: all but the output head."""


class ModelConfig(StrictConfig):
    """The model to train."""

    path: str
    """Hub id, folder, or ``builtin:calculator``."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number type of the forward and backward pass; optimizer state is always float32."""
    lora: LoraConfig | None = None
    """null: all weights are trained, but those in ``frozen``."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Weights that stay as they are: ``embeddings``, ``head`` (one is both where they are tied), or
    patterns of parameter names such as ``model.layers.0.*``."""

    @model_validator(mode="after")
    def _freezes_what_would_be_trained(self) -> Self:
        if self.lora is not None and self.frozen:
            raise ValueError(
                "model.frozen: with model.lora nothing but the adapter is trained anyway. Type "
                "model.frozen=[], and model.lora.target_modules=[...] for layers to adapt"
            )
        return self


class GenerationConfig(StrictConfig):
    """How completions are sampled. An agent's own request parameters go before these."""

    n_samples: int = Field(4, ge=1)
    """Trajectories per task: the size of a group."""
    max_tokens: int = Field(1024, ge=1)
    """Most tokens of one completion, also for requests that ask for more."""
    temperature: float = Field(1.0, ge=0.0, le=10.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)


class DatasetConfig(StrictConfig):
    """Where tasks come from."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a dataset on the hub, or an import path
    ``module:function`` of a function that returns rows."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of a hub dataset; passed to a function that names it."""
    batch_size: int = Field(64, ge=1)
    """Tasks per step."""
    shuffle: bool = True
    """A new order every epoch, from ``seed``."""
    limit: int | None = Field(None, ge=1)
    """Use the first ``limit`` rows only."""


class ExternalConfig(StrictConfig):
    """How programs elsewhere get tasks and give back trajectories (``agent_mode: external``)."""

    host: str = "127.0.0.1"
    """Address to listen at; one that other machines reach needs a key in AGENTRL_API_KEY."""
    port: int | None = Field(None, ge=1024, le=65535)
    """null: one that is free."""
    idle_timeout_seconds: float = Field(300.0, gt=0.0)
    """A session without a sign of life for so long is given to another program."""
    max_leases: int = Field(3, ge=1)
    """Times that one attempt is given out before it counts as failed."""
    max_wait_seconds: float = Field(3600.0, gt=0.0)
    """Longest time in which nobody asks for the tasks that wait; then the run stops."""


class RolloutConfig(StrictConfig):
    """How trajectories are made."""

    max_concurrent: int = Field(128, ge=1)
    """Trajectories in progress at the same time."""
    max_staleness: int = Field(2, ge=0)
    """Most weight updates between sampling a batch's oldest token and training on it."""
    filter: ReplaceGroupsConfig | None = None
    """null: every group is trained on. ``replace_groups_without_signal``: a group whose
    trajectories all scored alike gives its place in the batch to another task; not for shaped
    rewards (docs/how-it-works.md)."""
    curriculum: RestTasksConfig | None = None
    """null: every task once an epoch. ``rest_tasks_without_signal``: those whose groups scored
    alike are left out of some epochs (docs/how-it-works.md)."""
    turn_discount: float = Field(1.0, ge=0.0, le=1.0)
    """Share of a turn's credit that the turn before it receives."""
    export_style: Literal["concat", "individual"] = "concat"
    """``concat``: turns that continue each other are one sample; ``individual``: one per turn."""
    agent_mode: Literal["inline", "subprocess", "external"] = "inline"
    """Where agents run."""
    external: ExternalConfig = ExternalConfig()
    timeout_seconds: float = Field(600.0, gt=0.0)
    """Deadline of one trajectory: calls are refused then, and the agent is ended a few seconds
    later if it has not returned."""
    max_turns: int = Field(16, ge=1)
    """Most model calls of one trajectory."""
    max_tokens_per_trajectory: int = Field(32768, ge=1)
    """Most sampled tokens of one trajectory."""
    reward_timeout_seconds: float = Field(60.0, gt=0.0)
    """Deadline of one call of the reward function."""
    reward_workers: int = Field(1, ge=1)
    """Processes that run blocking reward functions."""
    num_workers: int | None = Field(None, ge=1)
    """Processes that run agents with ``agent_mode: subprocess``, each one trajectory at a time;
    null: ``max_concurrent``, but at most 8 for each CPU core: agents wait most of the time."""
    worker_max_tasks: int = Field(1, ge=1)
    """Trajectories after which a worker is replaced; 1: each has a process of its own, in which
    nothing is left of the one before."""
    worker_max_memory_gib: float | None = Field(None, gt=0.0)
    """Most memory of a worker and what it starts: past it, its trajectory fails. null: no limit."""

    def count_parallel(self) -> int:
        """Trajectories that run at the same time: those with a worker, where agents need one."""
        if self.agent_mode != "subprocess":
            return self.max_concurrent
        num_workers = self.num_workers or _WORKERS_PER_CORE * count_usable_cores()
        return min(self.max_concurrent, num_workers)

    def compute_deadline(self, num_trajectories: int, *, max_in_a_row: int = 1) -> float:
        """Seconds after which so many trajectories are over, whatever agents and rewards do.

        ``max_in_a_row``: most of them that begin one after the end of another.
        """
        num_waves = math.ceil(num_trajectories / self.count_parallel())
        if max_in_a_row > 1:
            # While places are free, one of the row is running (Graham 1966).
            num_waves += max_in_a_row
        seconds = self.timeout_seconds + self.reward_timeout_seconds
        if self.agent_mode == "external":
            # There may be one program, which takes them one after another.
            num_waves = num_trajectories
            seconds = (seconds + self.external.max_wait_seconds) * self.external.max_leases
        return 60.0 + num_waves * seconds


class TrainConfig(StrictConfig):
    """How the model is updated."""

    total_steps: int = Field(200, ge=1)
    learning_rate: float = Field(1.0e-6, gt=0.0)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = Field(None, validate_default=True)
    """Where ``algorithm.advantage`` is ``gae``; null without it."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up: constant, or a decay to ``min_learning_rate``."""
    min_learning_rate: float = Field(0.0, ge=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.999, ge=0.0, lt=1.0)
    adam_epsilon: float = Field(1.0e-8, gt=0.0)
    max_grad_norm: float = Field(1.0, gt=0.0)
    """Gradients are scaled down to this global norm."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer updates per step: the batch's groups are divided among them."""
    num_epochs: int = Field(1, ge=1)
    """Passes over the batch of one step."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Most tokens packed into one forward pass; a longer sample goes alone."""
    packing: Literal["prefix_tree", "plain"] = "prefix_tree"
    """``prefix_tree``: tokens that samples of a forward pass begin with alike (a prompt, turns that
    branches share) are computed once, and count once; ``plain``: in every sample."""
    gradient_checkpointing: bool = False
    """Trade compute for memory."""
    compile: Literal["layers"] | None = None
    """``layers``: torch.compile for the model's layers. Faster updates, after half a minute of
    compiling in the first step; needs a C++ compiler. null: nothing is compiled."""
    num_processes: int | None = Field(None, ge=1)
    """Processes that train together, the model in shards over them (FSDP2), each on a GPU of its
    own where the trainer has any; null: one for each GPU that engine servers leave, 1 on the CPU
    and with the embedded engine."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads of the trainer; null: all cores."""
    eval_every_steps: int | None = Field(None, ge=1)
    """null: evaluate before the first step and after the last one only."""
    save_every_steps: int | None = Field(None, ge=1)
    """null: save after the last step only."""
    keep_last_checkpoints: int = Field(3, ge=1)
    """Older checkpoints are deleted, the best one excepted."""
    keep_best_checkpoint: (
        Annotated[str, Field(pattern=r"^(mean_reward|pass_at_[1-9]\d*)$")] | None
    ) = "mean_reward"
    """Number of the evaluations (``mean_reward``, ``pass_at_1``, ...) by which the best checkpoint
    is saved after its evaluation, and never deleted while no other is better; null: none is."""
    alarms: AlarmsConfig = AlarmsConfig()
    probe_tolerance: float | None = Field(None, gt=0.0)
    """Largest |engine - trainer| logprob, in nats, after a weight publication;
    null: 1e-3 for float32, 0.1 for bfloat16."""

    @field_validator("critic")
    @classmethod
    def _fits_algorithm(cls, critic: CriticConfig | None, info: ValidationInfo) -> Any:
        algorithm = info.data.get("algorithm")
        if not isinstance(algorithm, AlgorithmConfig):
            # What is wrong with it is said there.
            return critic
        if algorithm.uses_critic:
            critic = critic or CriticConfig()
            total_steps = info.data.get("total_steps")
            if total_steps is not None and critic.warmup_steps >= total_steps:
                raise ValueError(
                    f"warmup_steps is {critic.warmup_steps} and train.total_steps {total_steps}: "
                    "the critic would learn alone until the end. Type "
                    f"train.critic.warmup_steps={total_steps - 1}, or a smaller number"
                )
            return critic
        if critic is not None:
            raise ValueError(
                f"advantages of kind {algorithm.advantage.kind} need no critic. Type "
                "train.critic=null, or train.algorithm.kind=ppo to train with one"
            )
        return critic


class LauncherConfig(StrictConfig):
    """Where processes run."""

    kind: Literal["local", "ray"] = "local"
    max_trainer_restarts: int = Field(3, ge=0)
    """Times that a trainer process which was killed is started again from its last checkpoint;
    only where the trainer is a process of its own (vllm, sglang)."""


class LoggerConfig(StrictConfig):
    """Where metrics go besides ``metrics.jsonl``."""

    kind: Literal["tensorboard", "wandb"]
    project: str | None = None
    """wandb: the project; null: ``experiment_name``."""


class AgentConfig(StrictConfig):
    """One of several agents, chosen by a row's ``agent_name``."""

    agent_builder_path: str
    agent_builder_kwargs: dict[str, Any] = Field(default_factory=dict)


class ExperimentConfig(StrictConfig):
    """Everything ``agentrl train`` and ``agentrl eval`` need."""

    experiment_name: FolderName
    trial_name: FolderName = "t0"
    output_dir: str = "runs"
    """Run folders are ``<output_dir>/<experiment_name>/<trial_name>``."""
    seed: int = Field(1, ge=0)
    model: ModelConfig
    tokenizer_path: str | None = None
    """null: the model's."""
    agent_builder_path: str | None = None
    """``package.module.function`` or ``path/to/file.py:function``."""
    agent_builder_kwargs: dict[str, Any] = Field(default_factory=dict)
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Named agents for rows with an ``agent_name``."""
    workflow_path: str | None = None
    """A RolloutWorkflow of your own, instead of an agent."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_fn_path: str | None = None
    """null: the agent (or the workflow) gives the reward."""
    gconfig: GenerationConfig = GenerationConfig()
    eval_gconfig: GenerationConfig | None = None
    """Sampling during evaluation; null: ``gconfig`` with one sample per task."""
    train_dataset: DatasetConfig
    valid_dataset: DatasetConfig | None = None
    """null: no evaluation while training."""
    engine: EngineConfig = EngineConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    launcher: LauncherConfig = LauncherConfig()
    loggers: Annotated[tuple[LoggerConfig, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _has_something_to_run(self) -> Self:
        is_external = self.rollout.agent_mode == "external"
        if is_external and (self.workflow_path or self.agent_builder_path or self.agents):
            raise ValueError(
                "rollout.agent_mode: external runs no agent of its own. Type "
                "agent_builder_path=null agents={} workflow_path=null"
            )
        if is_external:
            return self
        if self.workflow_path is None and self.agent_builder_path is None and not self.agents:
            raise ValueError("nothing to run: set agent_builder_path (or agents, or workflow_path)")
        return self

    def resolve_eval_gconfig(self) -> GenerationConfig:
        """The sampling of evaluations."""
        return self.eval_gconfig or self.gconfig.model_copy(update={"n_samples": 1})

    def resolve_max_replaced_groups(self) -> int:
        """Most groups of a step that are replaced; 0 without ``rollout.filter``."""
        replacing = self.rollout.filter
        if replacing is None:
            return 0
        return replacing.max_replaced_groups or self.train_dataset.batch_size

    def check_trainable(self) -> None:
        """Refuses what can be evaluated but not trained.

        Raises:
            ConfigError: groups of one, algorithm settings that do not go together, greedy
                sampling, a filter or a curriculum that has nothing to compare, a best checkpoint
                by what no evaluation reports, or weights that would not reach the engine's
                servers.
            MissingExtraError: ``model.lora`` is set and peft is not installed.
        """
        check_algorithm(
            self.train.algorithm,
            n_samples=self.gconfig.n_samples,
            max_tokens_per_trajectory=self.rollout.max_tokens_per_trajectory,
        )
        if self.gconfig.temperature == 0.0:
            raise ConfigError(
                "gconfig.temperature: 0 samples the same trajectory every time and leaves no "
                "gradient. Allowed when training: above 0. Type gconfig.temperature=1.0"
            )
        check_groups_are_compared(
            self.rollout.filter,
            self.rollout.curriculum,
            algorithm=self.train.algorithm,
            n_samples=self.gconfig.n_samples,
        )
        self._check_best_checkpoint()
        self._check_weights_reach_servers()

    def _check_best_checkpoint(self) -> None:
        metric, num_samples = self.train.keep_best_checkpoint, self.resolve_eval_gconfig().n_samples
        # Those that evaluations report: powers of two, and the number of samples.
        counts = [k for k in range(1, num_samples + 1) if k & (k - 1) == 0 or k == num_samples]
        allowed = ["mean_reward", *(f"pass_at_{k}" for k in counts)]
        if self.valid_dataset is not None and metric is not None and metric not in allowed:
            raise ConfigError(
                f"train.keep_best_checkpoint: {metric} is not reported by evaluations with "
                f"{num_samples} sample(s) per task (eval_gconfig.n_samples). Allowed: "
                f"{', '.join(allowed)}, null. Type train.keep_best_checkpoint={allowed[-1]}"
            )

    def _check_weights_reach_servers(self) -> None:
        transfer = self.engine.weight_transfer.kind
        if transfer == "lora" and self.model.lora is None:
            raise ConfigError(
                "engine.weight_transfer.kind: lora sends adapters, and without model.lora none is "
                "trained. Type engine.weight_transfer.kind=disk, or "
                "model.lora.rank=16 to train an adapter"
            )
        if transfer == "nccl" and self.engine.kind == "sglang":
            raise ConfigError(
                "engine.weight_transfer.kind: nccl is not supported with engine.kind sglang. "
                "Allowed: disk, lora. Type engine.weight_transfer.kind=disk"
            )
        if self.model.lora is not None and importlib.util.find_spec("peft") is None:
            raise MissingExtraError(
                "model.lora needs peft, which is not installed. Type uv pip install 'agentrl[lora]'"
            )
