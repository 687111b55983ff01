"""Group relative advantages, computed over trajectories and keyed by group id.

A trajectory's score is the mean of its interactions' returns; baselines and
deviations are taken over the scores of a group, so that a trajectory of ten turns
weighs as much as one of a single turn (see docs/how-it-works.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl_cli.records import Trajectory

#: Added to the deviation, so that nearly equal scores do not explode.
DEVIATION_EPSILON = 1e-6

#: Scores that differ by less than this share of their size are equal: sums of the same
#: rewards in another order differ by about 1e-16 of it.
EQUAL_SCORES_TOLERANCE = 1e-9


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

    A trajectory without any return (it made no model call) is scored by its reward.
    One whose reward is missing or not finite is unscored, as is one with a return that
    is not finite.
    """
    if trajectory.reward is None:
        return None
    returns = [i.turn_return for i in trajectory.interactions if i.turn_return is not None]
    score = math.fsum(returns) / len(returns) if returns else trajectory.reward
    return score if math.isfinite(score) and math.isfinite(trajectory.reward) else None


def compute_group_statistics(trajectories: Iterable[Trajectory]) -> dict[str, GroupStatistics]:
    """Mean and unbiased deviation of the scores of every group, by group id."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        score = compute_score(trajectory)
        scores[trajectory.group_id].extend(() if score is None else (score,))
    return {group_id: _summarize(group) for group_id, group in scores.items()}


def compute_advantages(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The advantage of every interaction, by interaction id.

    (return - group mean) / (group deviation + 1e-6), as in GRPO (arXiv 2402.03300,
    section 4.1.2), with the deviation unbiased. Exactly 0.0 in a group of one or of equal
    scores, in an unscored trajectory, and for an interaction without a return.
    """
    groups = compute_group_statistics(trajectories)
    advantages: dict[str, float] = {}
    for trajectory in trajectories:
        group = groups[trajectory.group_id]
        is_trained = compute_score(trajectory) is not None and group.has_signal
        for interaction in trajectory.interactions:
            turn_return = interaction.turn_return
            advantages[interaction.id] = (
                (turn_return - group.mean) / (group.deviation + DEVIATION_EPSILON)
                if is_trained and turn_return is not None
                else 0.0
            )
    return advantages


def _summarize(scores: list[float]) -> GroupStatistics:
    if not scores:
        return GroupStatistics(0.0, 0.0, 0)
    mean = math.fsum(scores) / len(scores)
    spread = max(scores) - min(scores)
    if spread <= EQUAL_SCORES_TOLERANCE * max(map(abs, scores)):
        return GroupStatistics(mean, 0.0, len(scores))
    squares = math.fsum((score - mean) ** 2 for score in scores)
    return GroupStatistics(mean, math.sqrt(squares / (len(scores) - 1)), len(scores))
