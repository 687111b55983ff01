"""What a trajectory scored, and whether the scores of a group differ.

Rollouts decide by it which groups are worth training on, the trainer takes its baselines from it,
and the run folder keeps it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl_cli.records import Trajectory

#: Scores that differ by less than this share of their size are equal: sums of the same
#: rewards in another order differ by about 1e-16 of it.
EQUAL_SCORES_TOLERANCE = 1e-9
#: What the metrics of reward parts begin with.
PART = "reward_part_"


@dataclass(frozen=True, slots=True)
class GroupStatistics:
    """Baseline and scale of one group's scores."""

    mean: float
    deviation: float
    """Unbiased (n - 1); exactly 0.0 for fewer than two scores and for equal ones."""
    num_scored: int

    @property
    def has_signal(self) -> bool:
        """False: every advantage of the group is exactly 0."""
        return self.deviation > 0.0


def compute_score(trajectory: Trajectory) -> float | None:
    """The trajectory's score: the mean of its interactions' returns; None: unscored.

    A trajectory without any completed model call is unscored, as is one whose reward is missing or
    not finite, or with a return that is not finite. One without any return is scored by its reward.
    """
    if trajectory.reward is None or not trajectory.num_turns:
        return None
    returns = [i.turn_return for i in trajectory.interactions if i.turn_return is not None]
    if not all(map(math.isfinite, (trajectory.reward, *returns))):
        return None
    return math.fsum(returns) / len(returns) if returns else trajectory.reward


def compute_part_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """The mean of every named part of the rewards, over the trajectories that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            if math.isfinite(value):
                values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def compute_statistics(scores: Sequence[float]) -> GroupStatistics:
    """Mean and unbiased deviation of the scores of one group."""
    if not scores:
        return GroupStatistics(0.0, 0.0, 0)
    mean = math.fsum(scores) / len(scores)
    spread = max(scores) - min(scores)
    if spread <= EQUAL_SCORES_TOLERANCE * max(map(abs, scores)):
        return GroupStatistics(mean, 0.0, len(scores))
    # Squares of large scores would overflow by themselves.
    distance = math.hypot(*(score - mean for score in scores))
    return GroupStatistics(mean, distance / math.sqrt(len(scores) - 1), len(scores))


def compute_group_statistics(trajectories: Iterable[Trajectory]) -> dict[str, GroupStatistics]:
    """Mean and unbiased deviation of the scores of every group, by group id."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        score = compute_score(trajectory)
        scores[trajectory.group_id].extend(() if score is None else (score,))
    return {group_id: compute_statistics(group) for group_id, group in scores.items()}
