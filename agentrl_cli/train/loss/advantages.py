"""Advantages of interactions, from statistics over trajectories that are keyed by group id, and the
penalties that are subtracted from rewards before.

A trajectory's score is the mean of its interactions' returns; baselines and deviations are taken
over the scores of a group, so that a trajectory of ten turns weighs as much as one of a single
turn (see docs/how-it-works.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from agentrl_cli.config.algorithm_config import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    GaeAdvantageConfig,
    KlConfig,
    MaxRlAdvantageConfig,
    OverlongConfig,
    ReinforcePlusPlusAdvantageConfig,
    RlooAdvantageConfig,
)
from agentrl_cli.errors import RunError
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import (
    GroupStatistics,
    compute_group_statistics,
    compute_score,
    compute_statistics,
)
from agentrl_cli.train.data.samples import Sample
from agentrl_cli.train.loss.policy_loss import compute_kl

#: Added to the deviation, so that nearly equal scores do not explode.
DEVIATION_EPSILON = 1e-6


def compute_advantages(
    trajectories: Sequence[Trajectory], config: AdvantageConfig
) -> dict[str, float]:
    """The advantage of every interaction, by interaction id.

    Exactly 0.0 in a group of one or of equal scores, in an unscored trajectory, and for an
    interaction without a return.

    Raises:
        RunError: ``config`` cannot be used with these rewards.
        ValueError: ``config`` is ``gae``, whose advantages are of tokens.
    """
    if isinstance(config, GaeAdvantageConfig):
        raise ValueError("advantages of kind gae are of tokens, from a critic's values")
    groups = compute_group_statistics(trajectories)
    scores = [compute_score(trajectory) for trajectory in trajectories]
    if isinstance(config, ReinforcePlusPlusAdvantageConfig) and config.baseline == "batch":
        of_batch = compute_statistics([score for score in scores if score is not None])
        groups = dict.fromkeys(groups, of_batch)
    scored = [(t, s, groups[t.group_id]) for t, s in zip(trajectories, scores, strict=True)]
    centered = [score - group.mean for _, score, group in scored if score is not None]
    batch_deviation = compute_statistics(centered).deviation
    advantages: dict[str, float] = {}
    for trajectory, score, group in scored:
        advantages |= dict.fromkeys((i.id for i in trajectory.interactions), 0.0)
        if score is None:
            continue
        if isinstance(config, MaxRlAdvantageConfig) and score < 0.0:
            raise RunError(
                f"trajectory {trajectory.id} has the score {score:g}: "
                "train.algorithm.advantage.kind maxrl divides by the mean score of a group. "
                "Allowed: rewards of 0 and above. "
                "Type train.algorithm.advantage.kind=grpo, or change the reward function"
            )
        if group.has_signal:
            baseline, scale = _find_baseline(config, score, group, batch_deviation)
            for interaction in trajectory.interactions:
                if interaction.turn_return is not None:
                    advantages[interaction.id] = (interaction.turn_return - baseline) / scale
    return advantages


def _find_baseline(
    config: AdvantageConfig, score: float, group: GroupStatistics, batch_deviation: float
) -> tuple[float, float]:
    """What is subtracted from the returns of a trajectory with ``score``, and what that is divided
    by. ``batch_deviation`` is that of all scores of the batch, each minus its group's mean."""
    if isinstance(config, DrGrpoAdvantageConfig):
        # Dr. GRPO (arXiv 2503.20783, section 3.2): easy and hard tasks weigh no more than others.
        return group.mean, 1.0
    if isinstance(config, RlooAdvantageConfig):
        # RLOO (Kool et al. 2019; arXiv 2402.14740): the mean score of the group's others, which is
        # independent of the trajectory that it judges.
        return (group.mean * group.num_scored - score) / (group.num_scored - 1), 1.0
    if isinstance(config, ReinforcePlusPlusAdvantageConfig):
        # REINFORCE++ (arXiv 2501.03262), the mean being the group's, or the batch's.
        return group.mean, batch_deviation + DEVIATION_EPSILON
    if isinstance(config, MaxRlAdvantageConfig):
        # MaxRL (arXiv 2602.02710): with rewards of 0 and 1 the group's gradient is the mean score
        # function of its successes minus that of all, an estimate of the gradient of the logarithm
        # of the success probability.
        return group.mean, group.mean
    # GRPO (arXiv 2402.03300, section 4.1.2), with the deviation unbiased.
    return group.mean, group.deviation + DEVIATION_EPSILON


class Penalties:
    """What is subtracted from the rewards of a batch, summed over the kinds of penalties."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        self._trajectories = trajectories
        self.amounts: defaultdict[int, float] = defaultdict(float)
        """By trajectory index."""
        self.means: dict[str, float] = {}
        """``<kind>_penalty_mean``, over all trajectories, and ``kl``, over all tokens."""

    def add_overlong(self, config: OverlongConfig, max_tokens: int) -> None:
        """Adds the soft overlong punishment of DAPO (arXiv 2503.14476, equation 13) to every scored
        trajectory, by the sampled tokens of all its calls.

        0 up to ``max_tokens - buffer_tokens``, ``coef`` from ``max_tokens`` on, linear between; the
        ``max_tokens`` are those of ``config``, where it gives any.
        """
        buffer = config.buffer_tokens
        free = (config.max_tokens or max_tokens) - buffer
        amounts = {
            index: config.coef * min(max((t.num_completion_tokens - free) / buffer, 0.0), 1.0)
            for index, t in enumerate(self._trajectories)
            if compute_score(t) is not None
        }
        self._add("overlong", amounts)

    def add_kl(
        self, samples: Sequence[Sample], ref_logprobs: Mapping[int, Tensor], config: KlConfig
    ) -> None:
        """Adds coef x the divergence of what each trajectory sampled; the metric ``kl`` is its
        estimate per token.

        The sum of the estimates over its trained tokens, of the policy that sampled them: the
        reward of RLHF (arXiv 2203.02155, equation 2), as RLOO keeps it (arXiv 2402.14740).
        ``ref_logprobs`` are [targets] by ``id(sample)``.

        Raises:
            RunError: a penalty is not finite.
        """
        amounts: defaultdict[int, float] = defaultdict(float)
        for sample in samples:
            rollout = sample.targets.rollout_logprobs
            kl = compute_kl(config.estimator, rollout, ref_logprobs[id(sample)])
            amounts[sample.trajectory_index] += config.coef * float(kl.double().sum())
            if not math.isfinite(amounts[sample.trajectory_index]):
                raise RunError(
                    f"trajectory {sample.trajectory_id}: its divergence from the reference model "
                    f"is {float(kl.sum())} nats. The weights were not changed. Look at it with: "
                    "agentrl inspect-trajectories RUN. model.dtype=float32 often helps"
                )
        self._add("kl", amounts)
        num_targets = sum(sample.num_targets for sample in samples)
        self.means["kl"] = math.fsum(amounts.values()) / (config.coef * max(num_targets, 1))

    def _add(self, kind: str, amounts: Mapping[int, float]) -> None:
        for index, amount in amounts.items():
            self.amounts[index] += amount
        mean = math.fsum(amounts.values()) / max(len(self._trajectories), 1)
        self.means[f"{kind}_penalty_mean"] = mean

    def reduce_rewards(self) -> list[Trajectory]:
        """The trajectories with the penalties subtracted from their rewards.

        Every interaction that has a return loses the whole penalty: it is part of the outcome,
        which every turn carries. Rewards of single turns stay as they are: whether a turn has one
        decides whose credit it shares, and advantages are computed from returns.
        """
        reduced = list(self._trajectories)
        for index, penalty in self.amounts.items():
            trajectory = reduced[index]
            if penalty == 0.0 or trajectory.reward is None:
                continue
            interactions = (
                i
                if i.turn_return is None
                else dataclasses.replace(i, turn_return=i.turn_return - penalty)
                for i in trajectory.interactions
            )
            reduced[index] = dataclasses.replace(
                trajectory,
                reward=trajectory.reward - penalty,
                interactions=tuple(interactions),
            )
        return reduced
