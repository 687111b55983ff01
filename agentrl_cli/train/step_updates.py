"""The updates of one step: minibatch by minibatch, the policy and then its critic."""

from __future__ import annotations

import math
import random
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from agentrl_cli.config.algorithm_config import GaeAdvantageConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import NotFiniteError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.store.layout import run_dir_of
from agentrl_cli.train.data.minibatches import Minibatch, build_minibatches
from agentrl_cli.train.data.packing import MicroBatch
from agentrl_cli.train.data.samples import Sample, assign_advantages, build_samples
from agentrl_cli.train.loss.advantages import Penalties, compute_advantages
from agentrl_cli.train.loss.gae import ValueTargets, assign_gae
from agentrl_cli.train.loss.policy_loss import LossInputs, compute_loss
from agentrl_cli.train.model.critic import Critic
from agentrl_cli.train.model.optimizer import compute_learning_rate
from agentrl_cli.train.model.policy import Policy
from agentrl_cli.train.model.trained_model import PackedSamples, TrainedModel
from agentrl_cli.train.monitor.update_metrics import UpdateMetrics
from agentrl_cli.train.ranks import Ranks

if TYPE_CHECKING:
    # It reads files with libraries that a learner alone does without.
    from agentrl_cli.store.trajectory_file import ProximalLogprobs

_log = get_logger(__name__)

#: Trajectories in a message.
_MAX_LISTED = 5

#: Logprobs [targets] by ``id(sample)``; None: they are not needed.
_Logprobs: TypeAlias = Mapping[int, Tensor] | None


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policy's updates from one minibatch are made from, in every epoch alike."""

    samples: Sequence[Sample]
    """Those of the minibatch that have a gradient, of all ranks."""
    packed: PackedSamples
    proximal: _Logprobs
    """None: there is one update alone, and the new logprobs are the proximal ones."""
    reference: _Logprobs


#: None: there is nothing to learn from.
PreparedMinibatch: TypeAlias = tuple[Minibatch, PolicyInputs | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdates:
    """Makes the updates of one step."""

    policy: Policy
    critic: Critic | None
    config: ExperimentConfig
    ranks: Ranks
    step: int
    """From 1."""
    policy_version: int
    """Of the weights before the step's first update."""
    metrics: UpdateMetrics
    _proximal: dict[int, Tensor] = field(default_factory=dict, init=False)
    """Logprobs [targets] by ``id(sample)``, of this rank's samples that pass forward."""

    def prepare(self, batch: StepBatch) -> list[PreparedMinibatch]:
        """The minibatches of ``batch``, with what is computed before the first update."""
        minibatches = build_minibatches(
            batch.trajectories, batch.samples, self.config, str(self.step)
        )
        return [(minibatch, self._prepare(minibatch)) for minibatch in minibatches]

    def make(self, batch: StepBatch, order: list[PreparedMinibatch]) -> None:
        """Makes them from ``batch``, and ``order`` as :meth:`prepare` gives it.

        Before the only update of a step the new policy is the proximal one by definition,
        however stale the tokens: another forward pass would compute the same numbers. Before
        several updates it is computed from the micro-batches that they are made from. All epochs
        have the same minibatches, each in an order of its own.

        Raises:
            NotFiniteError: a loss or gradient is not, and the update may not be left out; the
                weights are those from before that update.
        """
        train = self.config.train
        for epoch in range(train.num_epochs):
            random.Random(f"{self.config.seed}/{self.step}/{epoch}").shuffle(order)
            for minibatch, policy_inputs in order:
                if policy_inputs is not None:
                    self._train_policy(minibatch, policy_inputs)
                if self.critic is not None and batch.value_targets is not None:
                    self._train_critic(self.critic, minibatch.samples, batch.value_targets)

    def join_proximal_logprobs(self, batch: StepBatch) -> ProximalLogprobs:
        """What all ranks have computed until the end of :meth:`make`."""
        own = [n for n, sample in enumerate(batch.samples) if id(sample) in self._proximal]
        values = [self._proximal[id(batch.samples[n])] for n in own]
        numbers = torch.cat(self.ranks.gather_tensors(torch.tensor(own, dtype=torch.long)))
        joined = torch.cat(self.ranks.gather_tensors(torch.cat([torch.zeros(0), *values]))).numpy()
        lengths = {i.id: len(i.completion_ids) for t in batch.trajectories for i in t.interactions}
        found: dict[str, Any] = {}
        start = 0
        for sample in (batch.samples[n] for n in numbers.tolist()):
            for turn in sample.turns:
                part = joined[start + turn.start : start + turn.end]
                spread = np.full(lengths[turn.interaction_id], np.nan, np.float32)
                spread[len(spread) - len(part) :] = part
                found[turn.interaction_id] = spread
            start += sample.num_targets
        return found

    def _needs_forward(self, sample: Sample) -> bool:
        if self.critic is not None and self.critic.learns_alone(self.step):
            return False
        return sample.has_advantage or self.config.train.algorithm.trains_without_advantage

    def _prepare(self, minibatch: Minibatch) -> PolicyInputs | None:
        """What the policy's updates from a minibatch need.

        None: there is nothing to learn from (every advantage 0, no other term), so that the
        weights and the optimizer stay untouched.
        """
        train = self.config.train
        needed = [s for s in minibatch.samples if self._needs_forward(s)]
        if not needed:
            return None
        packed = self.policy.pack(needed)
        has_several_updates = train.num_minibatches * train.num_epochs > 1
        has_kl_loss = train.algorithm.has_kl_loss
        proximal = self.policy.score_packed(packed) if has_several_updates else None
        self._proximal.update(proximal or {})
        reference = self.policy.score_packed_reference(packed) if has_kl_loss else None
        return PolicyInputs(needed, packed, proximal, reference)

    def _train_policy(self, minibatch: Minibatch, prepared: PolicyInputs) -> None:
        """One update, its gradient added up over micro-batches."""
        proximal, reference = prepared.proximal, prepared.reference

        def compute_part(batch: MicroBatch) -> Tensor:
            scored = self.policy.forward(batch)
            if proximal is None:
                self._proximal.update(batch.split(scored.logprobs))
            inputs = LossInputs(
                new_logprobs=scored.logprobs,
                proximal_logprobs=(
                    scored.logprobs.detach() if proximal is None else batch.join(proximal)
                ),
                rollout_logprobs=batch.targets.rollout_logprobs,
                is_on_policy=batch.targets.versions == self.policy_version,
                advantages=batch.targets.advantages,
                sequence_numbers=batch.sequence_numbers,
                token_weights=batch.spread([minibatch.token_weights[id(s)] for s in batch.samples]),
                ref_logprobs=None if reference is None else batch.join(reference),
                entropies=scored.entropies,
            )
            output = compute_loss(inputs, self.config.train.algorithm)
            self.metrics.add_micro_batch(batch, output, scored.entropies)
            return output.loss

        learning_rate = compute_learning_rate(self.config.train, self.step)
        norm = self._apply_gradient(
            self.policy, prepared.samples, prepared.packed, compute_part, learning_rate
        )
        if norm is not None:
            self.metrics.add_update(norm)

    def _train_critic(
        self, critic: Critic, samples: Sequence[Sample], value_targets: ValueTargets
    ) -> None:
        """One update of the critic: it learns from every target of the minibatch alike."""
        if not any(sample.num_targets for sample in samples):
            return
        learning_rate = critic.compute_learning_rate(self.step)
        compute_part = critic.build_loss(samples, value_targets, self.metrics)
        norm = self._apply_gradient(
            critic, samples, critic.pack(samples), compute_part, learning_rate
        )
        if norm is not None:
            self.metrics.add_critic_update(norm, learning_rate)

    def _apply_gradient(
        self,
        trained: TrainedModel[Any],
        samples: Sequence[Sample],
        packed: PackedSamples,
        compute_part: Callable[[MicroBatch], Tensor],
        learning_rate: float,
    ) -> float | None:
        """One update by the gradient of the sum of ``compute_part``; the gradient's norm.

        None: a loss or gradient is not finite, and the update was skipped.

        Raises:
            NotFiniteError: one is not finite, and the update may not be skipped.
        """
        found: tuple[str, list[str]] | None = None
        for batch in packed.batches:
            loss = compute_part(batch)
            if found is None and not torch.isfinite(loss):
                found = f"the loss is {loss.item()}", _list_trajectories(batch.samples)
            # Even if it is not finite: the other ranks wait for this pass.
            loss.backward()  # type: ignore[no-untyped-call]
        trained.catch_up(packed)
        norm = trained.optimizer.clip_gradients()
        if found is None and not math.isfinite(norm):
            found = f"the gradient's norm is {norm}", _list_trajectories(samples)
        findings = [found for found in self.ranks.gather_objects(found) if found is not None]
        if not findings:
            trained.optimizer.step(learning_rate)
            return norm
        trained.optimizer.zero_gradients()
        # A loss is that of one micro-batch, a norm that of all.
        what, trajectory_ids = min(findings, key=lambda finding: len(finding[1]))
        self._report_not_finite(trained.role, what, trajectory_ids)
        self.metrics.skip_update()
        return None

    def _report_not_finite(self, role: str, what: str, trajectory_ids: Sequence[str]) -> None:
        train, config = self.config.train, self.config
        rest = len(trajectory_ids) - _MAX_LISTED
        names = ", ".join(trajectory_ids[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
        run, first = shlex.quote(run_dir_of(config)), shlex.quote(trajectory_ids[0])
        text = (
            f"step {self.step}: {'in the critic, ' if role == 'critic' else ''}{what} "
            f"(trajectories {names}). The weights are as they were before it\n"
            f"  look: agentrl inspect-trajectories {run} {first} --tokens"
        )
        if train.alarms.not_finite.action == "warn":
            _log.warning("%s", text)
            return
        suggestion = f"train.learning_rate={train.learning_rate / 2:g}"
        if role == "critic" and train.critic is not None:
            suggestion = f"train.critic.learning_rate={train.critic.learning_rate / 2:g}"
        if config.model.dtype != "float32":
            suggestion += " or model.dtype=float32"
        raise NotFiniteError(
            f"{text}\n  to continue without such updates, add train.alarms.not_finite.action=warn; "
            "the same command alone would learn from the same trajectories, and end here again\n"
            f"  in a new run (trial_name=NAME), {suggestion} often helps"
        )


def _list_trajectories(samples: Sequence[Sample]) -> list[str]:
    return list(dict.fromkeys(sample.trajectory_id for sample in samples))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The trajectories of a step, and what they were made into before its first update."""

    trajectories: Sequence[Trajectory]
    """All but those of groups that others took the place of."""
    samples: Sequence[Sample]
    """Of the scored ones."""
    value_targets: ValueTargets | None
    """What the critic learns from the samples; None: there is none."""
    metrics: Mapping[str, float]
    """Of penalties, and of the critic's values, where there are any."""


def build_step_batch(
    trajectories: Sequence[Trajectory],
    config: ExperimentConfig,
    policy: Policy,
    critic: Critic | None,
) -> StepBatch:
    """The batch of a step's ``trajectories``, unscored ones included."""
    kept = [t for t in trajectories if t.replaced_by is None]
    samples = build_samples(kept, config.rollout.export_style, policy.build_mask_maker())
    algorithm = config.train.algorithm
    penalties = Penalties(kept)
    if algorithm.overlong is not None:
        penalties.add_overlong(algorithm.overlong, config.rollout.max_tokens_per_trajectory)
    if algorithm.kl is not None and algorithm.has_kl_reward:
        penalties.add_kl(samples, policy.score_reference(samples), algorithm.kl)
    reduced = penalties.reduce_rewards()
    advantage = algorithm.advantage
    if critic is None or not isinstance(advantage, GaeAdvantageConfig):
        samples = assign_advantages(samples, compute_advantages(reduced, advantage))
        return StepBatch(kept, samples, None, penalties.means)
    samples, value_targets = assign_gae(
        reduced, samples, critic.score(samples), advantage, config.rollout.turn_discount
    )
    return StepBatch(kept, samples, value_targets, penalties.means | value_targets.summarize())
