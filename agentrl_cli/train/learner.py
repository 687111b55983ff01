"""The learner: holds the model and its optimizer, and turns trajectories into updates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.advantage import GaeAdvantageConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.train.advantages import compute_advantages
from agentrl_cli.train.checkpoint import load_learner_state, save_learner_state
from agentrl_cli.train.critic import Critic, describe_critic, open_critic
from agentrl_cli.train.faults import (
    ComputePart,
    FaultReport,
    Part,
    SaveFault,
    add_up_gradient,
    find_in_parts,
    list_values,
)
from agentrl_cli.train.fixed_logprobs import FixedLogprobs
from agentrl_cli.train.losses import LossInputs, compute_loss
from agentrl_cli.train.minibatches import Minibatch, build_minibatches
from agentrl_cli.train.optimizer import compute_learning_rate
from agentrl_cli.train.packing import MicroBatch
from agentrl_cli.train.penalties import (
    Penalties,
    compute_overlong_penalties,
    reduce_rewards,
)
from agentrl_cli.train.policy import Policy, Trained, open_policy
from agentrl_cli.train.ranks import SINGLE, Ranks
from agentrl_cli.train.samples import (
    Sample,
    assign_advantages,
    build_samples,
    build_scoring_sample,
)
from agentrl_cli.train.threads import use_threads
from agentrl_cli.train.update_metrics import UpdateMetrics
from agentrl_cli.train.value_targets import ValueTargets, assign_gae

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = get_logger(__name__)


class Learner:
    """A model in training. Its methods block; call them from one thread at a time.

    ``step`` counts the updates made; a saved and loaded learner goes on bit for bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        reference_model: PreTrainedModel | None = None,
        critic_model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        device: torch.device | str = "cpu",
        published: Literal["whole", "adapter"] = "whole",
        ranks: Ranks = SINGLE,
    ) -> None:
        """Takes ``model`` over: it is moved, cast and changed by every update.

        With ``config.model.lora`` an adapter is put on it, which alone is trained.

        Args:
            model: in float32 if it is to be trained from its exact weights; it computes in
                ``config.model.dtype``.
            config: the experiment's.
            reference_model: needed with ``kl``; frozen. With an adapter, the model
                without it is the reference.
            critic_model: needed with ``config.train.critic``; taken over too, its output head
                replaced by one that gives a value.
            tokenizer: saved beside the weights; trajectories with a structural tag need it.
            device: where the models are kept.
            published: what :meth:`weights` gives: all weights (an adapter added to them), or
                the adapter's, as ``engine.weight_transfer.kind`` lora sends them.
            ranks: the processes that train the model together, which call the same methods in
                the same order; what a method gives is whole on rank 0.

        Raises:
            MissingExtraError: an adapter is asked for and peft is not installed.
            ModelError: an architecture whose attention or output head agentrl cannot follow,
                or an adapter that does not fit.
            ValueError: ``kl`` is set and ``reference_model`` is missing, or a critic is to be
                trained and ``critic_model`` is.
        """
        uses_reference = config.train.algorithm.uses_reference
        if uses_reference and config.model.lora is None and reference_model is None:
            raise ValueError("train.algorithm.kl is set: the learner needs a reference_model")
        if config.train.critic is not None and critic_model is None:
            raise ValueError("train.critic is set: the learner needs a critic_model")
        self.step = 0
        self._config = config
        self._train = config.train
        self._ranks = ranks
        self._policy: Policy = open_policy(
            model,
            config,
            ranks,
            reference_model=reference_model if uses_reference else None,
            tokenizer=tokenizer,
            device=torch.device(device),
            published=published,
        )
        self._critic: Critic | None = None
        if config.train.critic is not None and critic_model is not None:
            self._critic = open_critic(critic_model, config, ranks, torch.device(device))

    @property
    def model(self) -> PreTrainedModel:
        """The model in training."""
        return self._policy.model

    def update(
        self,
        trajectories: Sequence[Trajectory],
        policy_version: int,
        save_fault: SaveFault | None = None,
    ) -> dict[str, float]:
        """Improves the model on the trajectories of one step; metrics of the update.

        Args:
            trajectories: the whole batch, unscored ones included; those of groups that others
                took the place of are left out.
            policy_version: of the weights before the update; tokens of other versions count
                in ``off_policy_fraction``.
            save_fault: keeps a micro-batch whose loss or gradient is not finite.

        Returns:
            ``loss``, ``grad_norm``, ``learning_rate``, ``approx_kl``, ``clipfrac``, ``kl``,
            ``entropy``, ``logprob_gap_mean``, ``logprob_gap_max``, ``off_policy_fraction``,
            ``rollout_correction_mean``, ``rollout_correction_max`` (before bounds),
            ``rollout_correction_dropped_fraction``, ``overlong_penalty_mean`` and
            ``kl_penalty_mean`` where they are set, ``num_samples``, ``num_micro_batches``,
            ``num_updates``, ``num_skipped_updates``, ``train_tokens`` (tokens passed forward and
            back), ``train_seconds``; with a critic also ``value_loss``, ``value_clipfrac``,
            ``explained_variance`` (missing where returns are equal), ``value_mean``,
            ``return_mean``, ``critic_grad_norm``, ``critic_learning_rate``.

        Raises:
            NotFiniteError: a loss or gradient is not, and the update may not be left out; the
                weights are those from before that minibatch.
        """
        started = time.perf_counter()
        use_threads(self._train.num_threads, self._ranks.count)
        self.step += 1
        trajectories = [t for t in trajectories if t.replaced_by is None]
        learning_rate = compute_learning_rate(self._train, self.step)
        export_style = self._config.rollout.export_style
        samples = build_samples(trajectories, None, export_style, self._policy.build_mask_maker())
        penalties = self._compute_penalties(trajectories, samples)
        reduced = reduce_rewards(trajectories, penalties.amounts)
        samples, value_targets = self._assign_advantages(reduced, samples)
        metrics = UpdateMetrics(samples, policy_version)
        self._faults = FaultReport(self._config, self.step, self._ranks, save_fault)
        fixed = self._score_fixed([s for s in samples if self._needs_forward(s)])
        for epoch in range(self._train.num_epochs):
            shuffle_key = f"{self.step}/{epoch}"
            for one in build_minibatches(trajectories, samples, self._config, shuffle_key):
                self._train_minibatch(one, learning_rate, metrics, fixed)
                if self._critic is not None and value_targets is not None:
                    self._train_critic(self._critic, one.samples, value_targets, metrics)
        if self._policy.device.type == "cuda":
            # What is only cached here is missing to an engine on the same GPU.
            torch.cuda.empty_cache()
        metrics.add_ranks(self._ranks)
        seconds = time.perf_counter() - started
        return {
            **metrics.summarize(),
            **penalties.means,
            **({} if value_targets is None else value_targets.summarize()),
            "learning_rate": learning_rate,
            "train_seconds": seconds,
        }

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        replaced: Mapping[str, Tensor] | None = None,
    ) -> list[list[float]]:
        """Logprobs of the tokens of each list from position ``starts[i]`` (default 1) to its end.

        They are of the distribution that is sampled from at ``temperature`` and ``top_p``.
        Tensors in ``replaced`` stand for the published ones of that name; of two names of one
        tensor, for the one given alone.
        """
        use_threads(self._train.num_threads, self._ranks.count)
        starts = [1] * len(token_id_lists) if starts is None else starts
        samples = [
            build_scoring_sample(ids, start, temperature=temperature, top_p=top_p)
            for ids, start in zip(token_id_lists, starts, strict=True)
        ]
        scored = self._policy.score([s for s in samples if s.num_targets], replaced)
        return [scored[id(sample)].tolist() if id(sample) in scored else [] for sample in samples]

    def weights(self) -> dict[str, Tensor]:
        """The published tensors by name, in the dtype the model computes in, mostly not copied.

        All weights have their Hugging Face names, tied ones once, under the first of theirs;
        an adapter's have those of peft's files.
        """
        return self._policy.weights()

    def published_names(self) -> Mapping[str, str]:
        """Every name of a published tensor -> the one it has in :meth:`weights`."""
        return self._policy.published_names()

    def save(self, folder: str | Path) -> None:
        """Writes a folder that ``AutoModelForCausalLM.from_pretrained`` and :meth:`load` read.

        With an adapter it holds the adapter alone, in peft's format, and names its base model.

        Raises:
            StoreError: it cannot be written.
        """
        self._policy.save(Path(folder))
        if self._critic is not None:
            self._critic.save(Path(folder))
        if self._ranks.index == 0:
            save_learner_state(Path(folder), step=self.step, facts=self._describe())
        self._ranks.barrier()

    def load(self, folder: str | Path) -> None:
        """Goes on from what :meth:`save` wrote: weights, optimizer, step, random states.

        Raises:
            RunFolderError: not a checkpoint of this kind of learner.
            StoreError: it is damaged.
        """
        step = load_learner_state(Path(folder), self._describe())
        self._policy.load(Path(folder))
        if self._critic is not None:
            self._critic.load(Path(folder))
        self.step = step

    def _describe(self) -> dict[str, Any]:
        """What must be equal where a checkpoint is loaded."""
        return self._policy.describe() | describe_critic(self._critic)

    def _needs_forward(self, sample: Sample) -> bool:
        if self._critic is not None and self._critic.learns_alone(self.step):
            return False
        return sample.has_advantage or self._train.algorithm.trains_without_advantage

    def _compute_penalties(
        self, trajectories: Sequence[Trajectory], samples: Sequence[Sample]
    ) -> Penalties:
        """What is taken off the rewards of this batch."""
        algorithm = self._train.algorithm
        limit = self._config.rollout.max_tokens_per_trajectory
        penalties = Penalties(len(trajectories))
        if algorithm.overlong is not None:
            penalties.add(
                "overlong", compute_overlong_penalties(trajectories, algorithm.overlong, limit)
            )
        if algorithm.kl is not None and algorithm.has_kl_reward:
            penalties.add_kl(samples, self._policy.score_reference(samples), algorithm.kl)
        return penalties

    def _assign_advantages(
        self, trajectories: Sequence[Trajectory], samples: Sequence[Sample]
    ) -> tuple[list[Sample], ValueTargets | None]:
        """The samples with their advantages; with a critic also what it learns from them."""
        config = self._train.algorithm.advantage
        if self._critic is None or not isinstance(config, GaeAdvantageConfig):
            return assign_advantages(samples, compute_advantages(trajectories, config)), None
        values = self._critic.score(samples)
        turn_discount = self._config.rollout.turn_discount
        return assign_gae(trajectories, samples, values, config, turn_discount)

    def _score_fixed(self, samples: Sequence[Sample]) -> FixedLogprobs:
        """What stays fixed during the step.

        Before the only update of a step the new policy is the proximal one by definition,
        however stale the tokens: another forward pass would compute the same numbers.
        """
        has_kl_loss = self._train.algorithm.has_kl_loss
        has_several_updates = self._train.num_minibatches * self._train.num_epochs > 1
        return FixedLogprobs(
            proximal=self._policy.score(samples) if has_several_updates else None,
            reference=self._policy.score_reference(samples) if has_kl_loss else None,
        )

    def _train_minibatch(
        self,
        minibatch: Minibatch,
        learning_rate: float,
        metrics: UpdateMetrics,
        fixed: FixedLogprobs,
    ) -> None:
        """One optimizer update, its gradient added up over packed micro-batches.

        Without anything to learn from (every advantage 0, no other term) the weights and the
        optimizer stay untouched.
        """
        needed = [s for s in minibatch.samples if self._needs_forward(s)]
        if not needed:
            return
        norm = self._apply_gradient(
            self._policy,
            needed,
            lambda batch: self._compute_part(batch, minibatch.token_weights, metrics, fixed),
            learning_rate,
        )
        if norm is None:
            metrics.skip_update()
        else:
            metrics.add_update(norm)

    def _train_critic(
        self,
        critic: Critic,
        samples: Sequence[Sample],
        value_targets: ValueTargets,
        metrics: UpdateMetrics,
    ) -> None:
        """One update of the critic: it learns from every target of the minibatch alike."""
        if not any(sample.num_targets for sample in samples):
            return
        learning_rate = critic.compute_learning_rate(self.step)
        compute_part = critic.build_loss(samples, value_targets, metrics)
        norm = self._apply_gradient(critic, samples, compute_part, learning_rate)
        if norm is None:
            metrics.skip_update()
        else:
            metrics.add_critic_update(norm, learning_rate)

    def _apply_gradient(
        self,
        trained: Trained,
        samples: Sequence[Sample],
        compute_part: ComputePart,
        learning_rate: float,
    ) -> float | None:
        """One update by the gradient of the parts of a loss; the gradient's norm.

        None: a loss or gradient is not finite, and the update was left out.

        Raises:
            NotFiniteError: one is not finite, and may not be left out; the weights are as before.
        """
        norm, fault = add_up_gradient(trained, samples, compute_part)
        worst = self._faults.find_worst(fault)
        if worst is None:
            trained.optimizer.step(learning_rate)
            return norm
        if fault is not None and not fault.is_local and self._ranks.count == 1:
            fault = find_in_parts(trained, samples, compute_part, fault)
        trained.optimizer.zero_gradients()
        _log.warning("%s", self._faults.refuse(trained, fault, worst))
        return None

    def _compute_part(
        self,
        batch: MicroBatch,
        token_weights: Mapping[int, float],
        metrics: UpdateMetrics,
        fixed: FixedLogprobs,
    ) -> Part:
        """The micro-batch's part in the minibatch's loss."""
        scored = self._policy.forward(batch)
        proximal, reference = fixed.join(batch)
        inputs = LossInputs(
            new_logprobs=scored.logprobs,
            proximal_logprobs=scored.logprobs.detach() if proximal is None else proximal,
            rollout_logprobs=batch.targets.rollout_logprobs,
            advantages=batch.targets.advantages,
            sequence_numbers=batch.sequence_numbers,
            token_weights=batch.spread([token_weights[id(s)] for s in batch.samples]),
            ref_logprobs=reference,
            entropies=scored.entropies,
        )
        output = compute_loss(inputs, self._train.algorithm)
        metrics.add_micro_batch(batch, output, scored.entropies)
        return Part(output.loss, list_values(inputs))
