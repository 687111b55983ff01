"""Advantages of interactions, from statistics over trajectories that are keyed by group id.

A trajectory's score is the mean of its interactions' returns; baselines and
deviations are taken over the scores of a group, so that a trajectory of ten turns
weighs as much as one of a single turn (see docs/how-it-works.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentrl_cli.config.advantage import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    GaeAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
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

#: Added to the deviation, so that nearly equal scores do not explode.
DEVIATION_EPSILON = 1e-6

#: (turn's return, trajectory's score, statistics that it is compared within) -> advantage.
Estimator = Callable[[float, float, GroupStatistics], float]


def compute_advantages(
    trajectories: Sequence[Trajectory], config: AdvantageConfig
) -> dict[str, float]:
    """The advantage of every interaction, by interaction id.

    Exactly 0.0 in a group of one or of equal scores, in an unscored trajectory, and for an
    interaction without a return.

    Raises:
        RunError: rewards that ``config`` cannot be used with.
        ValueError: ``config`` is ``gae``, whose advantages are of tokens.
    """
    groups, estimate = _prepare(trajectories, config)
    advantages: dict[str, float] = {}
    for trajectory in trajectories:
        score, group = compute_score(trajectory), groups[trajectory.group_id]
        for interaction in trajectory.interactions:
            turn_return = interaction.turn_return
            advantages[interaction.id] = (
                0.0
                if score is None or turn_return is None or not group.has_signal
                else estimate(turn_return, score, group)
            )
    return advantages


def estimate_grpo(turn_return: float, score: float, group: GroupStatistics) -> float:
    """(return - group mean) / (group deviation + 1e-6): GRPO (arXiv 2402.03300, section 4.1.2),
    with the deviation unbiased."""
    return (turn_return - group.mean) / (group.deviation + DEVIATION_EPSILON)


def estimate_dr_grpo(turn_return: float, score: float, group: GroupStatistics) -> float:
    """return - group mean: Dr. GRPO (arXiv 2503.20783, section 3.2), whose removal of the deviation
    keeps the weight of questions independent of how hard they are."""
    return turn_return - group.mean


def estimate_rloo(turn_return: float, score: float, group: GroupStatistics) -> float:
    """return - mean score of the others: the leave-one-out baseline of RLOO (Kool et al. 2019;
    arXiv 2402.14740, section 2.3), independent of the trajectory that it judges."""
    others = group.mean + (group.mean - score) / (group.num_scored - 1)
    return turn_return - others


def estimate_maxrl(turn_return: float, score: float, group: GroupStatistics) -> float:
    """(return - group mean) / group mean: MaxRL (arXiv 2602.02710, algorithm 1).

    With rewards of 0 and 1 and K successes, the average over the group is the mean score
    gradient of the successes less that of all: an estimate of the gradient of the logarithm of
    the success probability, whose first term is what plain policy gradients follow.
    """
    return (turn_return - group.mean) / group.mean


def _prepare(
    trajectories: Sequence[Trajectory], config: AdvantageConfig
) -> tuple[Mapping[str, GroupStatistics], Estimator]:
    """The statistics that trajectories are compared within, by group id, and how."""
    groups = compute_group_statistics(trajectories)
    if isinstance(config, GaeAdvantageConfig):
        raise ValueError("advantages of kind gae are of tokens, from a critic's values")
    if isinstance(config, GrpoAdvantageConfig):
        return groups, estimate_grpo
    if isinstance(config, DrGrpoAdvantageConfig):
        return groups, estimate_dr_grpo
    if isinstance(config, RlooAdvantageConfig):
        return groups, estimate_rloo
    if isinstance(config, MaxRlAdvantageConfig):
        _check_not_negative(trajectories)
        return groups, estimate_maxrl
    return _prepare_reinforce_plus_plus(trajectories, groups, config.baseline)


def _prepare_reinforce_plus_plus(
    trajectories: Sequence[Trajectory], groups: dict[str, GroupStatistics], baseline: str
) -> tuple[Mapping[str, GroupStatistics], Estimator]:
    """(return - baseline) / (deviation over the batch + 1e-6): REINFORCE++ (arXiv 2501.03262,
    section 3).

    With the baseline ``batch`` all trajectories are one group. With ``group`` the deviation is
    that of the scores less their group means, over all scored trajectories of the batch.
    """
    if baseline == "batch":
        scores = [compute_score(trajectory) for trajectory in trajectories]
        whole = compute_statistics([score for score in scores if score is not None])
        return dict.fromkeys(groups, whole), estimate_grpo
    centered = []
    for trajectory in trajectories:
        score = compute_score(trajectory)
        if score is not None:
            centered.append(score - groups[trajectory.group_id].mean)
    scale = compute_statistics(centered).deviation + DEVIATION_EPSILON

    def estimate(turn_return: float, score: float, group: GroupStatistics) -> float:
        return (turn_return - group.mean) / scale

    return groups, estimate


def _check_not_negative(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        score = compute_score(trajectory)
        if score is not None and score < 0.0:
            raise RunError(
                f"trajectory {trajectory.id} has the score {score:g}: "
                "train.algorithm.advantage.kind maxrl divides by the mean score of a group. "
                "Allowed: rewards, penalties taken off, of 0 and above. "
                "Type train.algorithm.advantage.kind=grpo, or change the reward function"
            )
