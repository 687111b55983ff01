"""The updates of one step: minibatch by minibatch, the policy and then its critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from agentrl_cli.config.algorithm_config import GaeAdvantageConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.train.data.minibatches import Minibatch, build_minibatches
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample, assign_advantages, build_samples
from agentrl_cli.train.loss.advantages import Penalties, compute_advantages
from agentrl_cli.train.loss.gae import ValueTargets, assign_gae
from agentrl_cli.train.loss.policy_loss import LossInputs, compute_loss
from agentrl_cli.train.model.critic import Critic
from agentrl_cli.train.model.optimizer import compute_learning_rate
from agentrl_cli.train.model.policy import Policy
from agentrl_cli.train.model.trained_model import TrainedModel
from agentrl_cli.train.monitor.update_metrics import UpdateMetrics
from agentrl_cli.train.non_finite import (
    ComputePart,
    NonFiniteReport,
    Part,
    add_up_gradient,
    list_values,
)

_log = get_logger(__name__)


class StepUpdates:
    """Makes the updates of one step, once.

    Args:
        policy: is improved.
        critic: too, where there is one.
        config: the experiment's.
        step: from 1.
        metrics: count what happens.
        faults: reports what is not finite.
    """

    def __init__(
        self,
        policy: Policy,
        critic: Critic | None,
        config: ExperimentConfig,
        *,
        step: int,
        metrics: UpdateMetrics,
        faults: NonFiniteReport,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._config = config
        self._train = config.train
        self._step = step
        self._metrics = metrics
        self._faults = faults

    def make(self, batch: StepBatch) -> None:
        """Makes them from ``batch``.

        Raises:
            NotFiniteError: a loss or gradient is not, and the update may not be left out; the
                weights are those from before that update.
        """
        fixed = self._score_fixed([s for s in batch.samples if self._needs_forward(s)])
        for epoch in range(self._train.num_epochs):
            shuffle_key = f"{self._step}/{epoch}"
            for minibatch in build_minibatches(
                batch.trajectories, batch.samples, self._config, shuffle_key
            ):
                self._train_policy(minibatch, fixed)
                if self._critic is not None and batch.value_targets is not None:
                    self._train_critic(self._critic, minibatch.samples, batch.value_targets)

    def _needs_forward(self, sample: Sample) -> bool:
        if self._critic is not None and self._critic.learns_alone(self._step):
            return False
        return sample.has_advantage or self._train.algorithm.trains_without_advantage

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

    def _train_policy(self, minibatch: Minibatch, fixed: FixedLogprobs) -> None:
        """One update, its gradient added up over micro-batches.

        Without anything to learn from (every advantage 0, no other term) the weights and the
        optimizer stay untouched.
        """
        needed = [s for s in minibatch.samples if self._needs_forward(s)]
        if not needed:
            return
        norm = self._apply_gradient(
            self._policy,
            needed,
            lambda batch: self._compute_part(batch, minibatch, fixed),
            compute_learning_rate(self._train, self._step),
        )
        if norm is None:
            self._metrics.skip_update()
        else:
            self._metrics.add_update(norm)

    def _compute_part(self, batch: MicroBatch, minibatch: Minibatch, fixed: FixedLogprobs) -> Part:
        """The micro-batch's part in the minibatch's loss."""
        scored = self._policy.forward(batch)
        proximal, reference = fixed.join(batch)
        inputs = LossInputs(
            new_logprobs=scored.logprobs,
            proximal_logprobs=scored.logprobs.detach() if proximal is None else proximal,
            rollout_logprobs=batch.targets.rollout_logprobs,
            advantages=batch.targets.advantages,
            sequence_numbers=batch.sequence_numbers,
            token_weights=batch.spread([minibatch.token_weights[id(s)] for s in batch.samples]),
            ref_logprobs=reference,
            entropies=scored.entropies,
        )
        output = compute_loss(inputs, self._train.algorithm)
        self._metrics.add_micro_batch(batch, output, scored.entropies)
        return Part(output.loss, list_values(inputs))

    def _train_critic(
        self, critic: Critic, samples: Sequence[Sample], value_targets: ValueTargets
    ) -> None:
        """One update of the critic: it learns from every target of the minibatch alike."""
        if not any(sample.num_targets for sample in samples):
            return
        learning_rate = critic.compute_learning_rate(self._step)
        compute_part = critic.build_loss(samples, value_targets, self._metrics)
        norm = self._apply_gradient(critic, samples, compute_part, learning_rate)
        if norm is None:
            self._metrics.skip_update()
        else:
            self._metrics.add_critic_update(norm, learning_rate)

    def _apply_gradient(
        self,
        trained: TrainedModel[Any],
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
        fault = self._faults.trace(trained, samples, compute_part, fault)
        trained.optimizer.zero_gradients()
        _log.warning("%s", self._faults.refuse(trained, fault, worst))
        return None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The trajectories of a step, and what they were made into before its first update."""

    trajectories: Sequence[Trajectory]
    """All but those of groups that others took the place of."""
    samples: Sequence[Sample]
    """Of the scored ones."""
    value_targets: ValueTargets | None
    """What the critic learns from the samples; None: there is none."""
    penalty_means: Mapping[str, float]

    def summarize(self) -> dict[str, float]:
        """The metrics of penalties, and of the critic's values, where there are any."""
        values = {} if self.value_targets is None else self.value_targets.summarize()
        return {**self.penalty_means, **values}


def build_step_batch(
    trajectories: Sequence[Trajectory],
    config: ExperimentConfig,
    policy: Policy,
    critic: Critic | None,
) -> StepBatch:
    """The batch of a step's ``trajectories``, unscored ones included."""
    kept = [t for t in trajectories if t.replaced_by is None]
    samples = build_samples(kept, config.rollout.export_style, policy.build_mask_maker())
    penalties = _compute_penalties(kept, samples, config, policy)
    reduced = penalties.reduce_rewards()
    advantage = config.train.algorithm.advantage
    value_targets = None
    if critic is None or not isinstance(advantage, GaeAdvantageConfig):
        samples = assign_advantages(samples, compute_advantages(reduced, advantage))
    else:
        samples, value_targets = assign_gae(
            reduced, samples, critic.score(samples), advantage, config.rollout.turn_discount
        )
    return StepBatch(kept, samples, value_targets, penalties.means)


def _compute_penalties(
    trajectories: Sequence[Trajectory],
    samples: Sequence[Sample],
    config: ExperimentConfig,
    policy: Policy,
) -> Penalties:
    """What is taken off the rewards."""
    algorithm = config.train.algorithm
    penalties = Penalties(trajectories)
    if algorithm.overlong is not None:
        penalties.add_overlong(algorithm.overlong, config.rollout.max_tokens_per_trajectory)
    if algorithm.kl is not None and algorithm.has_kl_reward:
        penalties.add_kl(samples, policy.score_reference(samples), algorithm.kl)
    return penalties


@dataclass(frozen=True, slots=True)
class FixedLogprobs:
    """Logprobs [targets] by ``id(sample)``, made once before the step's first update."""

    proximal: Mapping[int, Tensor] | None
    """None: those of the update's own forward pass."""
    reference: Mapping[int, Tensor] | None
    """None: there is no KL term."""

    def join(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Those of the micro-batch's targets, on its device."""
        return (
            None if self.proximal is None else batch.join(self.proximal),
            None if self.reference is None else batch.join(self.reference),
        )
