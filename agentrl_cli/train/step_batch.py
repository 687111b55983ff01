"""What one step learns from: the samples of its trajectories, with their advantages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_cli.config.advantage import GaeAdvantageConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Trajectory
from agentrl_cli.train.advantages import compute_advantages
from agentrl_cli.train.critic import Critic
from agentrl_cli.train.penalties import Penalties, compute_overlong_penalties, reduce_rewards
from agentrl_cli.train.policy import Policy
from agentrl_cli.train.samples import Sample, assign_advantages, build_samples
from agentrl_cli.train.value_targets import ValueTargets, assign_gae


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
    samples = build_samples(kept, None, config.rollout.export_style, policy.build_mask_maker())
    penalties = _compute_penalties(kept, samples, config, policy)
    reduced = reduce_rewards(kept, penalties.amounts)
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
    penalties = Penalties(len(trajectories))
    if algorithm.overlong is not None:
        limit = config.rollout.max_tokens_per_trajectory
        amounts = compute_overlong_penalties(trajectories, algorithm.overlong, limit)
        penalties.add("overlong", amounts)
    if algorithm.kl is not None and algorithm.has_kl_reward:
        penalties.add_kl(samples, policy.score_reference(samples), algorithm.kl)
    return penalties
