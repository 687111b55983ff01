"""Advantages of interactions, from statistics over trajectories that are keyed by group id.

A trajectory's score is the mean of its interactions' returns; baselines and deviations are taken
over the scores of a group, so that a trajectory of ten turns weighs as much as one of a single
turn (see docs/how-it-works.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl_cli.config.algorithm_config import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    GrpoAdvantageConfig,
    MaxRlAdvantageConfig,
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

#: Added to the deviation, so that nearly equal scores do not explode.
DEVIATION_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class Standing:
    """What the returns of a trajectory are compared with."""

    score: float
    group: GroupStatistics
    """Of the trajectories that it is compared with, including itself."""
    batch_deviation: float
    """Unbiased deviation of all scores of the batch, each minus its group's mean."""


#: An interaction's return, and its trajectory's standing -> the interaction's advantage.
Estimator = Callable[[float, Standing], float]


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
    estimate = _ESTIMATORS.get(type(config))
    if estimate is None:
        raise ValueError("advantages of kind gae are of tokens, from a critic's values")
    if isinstance(config, MaxRlAdvantageConfig):
        _check_not_negative(trajectories)
    advantages: dict[str, float] = {}
    for trajectory, standing in zip(trajectories, _rank(trajectories, config), strict=True):
        for interaction in trajectory.interactions:
            turn_return = interaction.turn_return
            advantages[interaction.id] = (
                0.0 if standing is None or turn_return is None else estimate(turn_return, standing)
            )
    return advantages


def estimate_grpo(turn_return: float, standing: Standing) -> float:
    """(return - group mean) / (group deviation + 1e-6): GRPO (arXiv 2402.03300, section 4.1.2),
    with the deviation unbiased."""
    return (turn_return - standing.group.mean) / (standing.group.deviation + DEVIATION_EPSILON)


def estimate_dr_grpo(turn_return: float, standing: Standing) -> float:
    """return - group mean: Dr. GRPO (arXiv 2503.20783, section 3.2), in which easy and hard tasks
    weigh no more than others."""
    return turn_return - standing.group.mean


def estimate_rloo(turn_return: float, standing: Standing) -> float:
    """return - mean score of the group's others: the leave-one-out baseline of RLOO (Kool et al.
    2019; arXiv 2402.14740), independent of the trajectory that it judges."""
    group = standing.group
    mean_of_others = (group.mean * group.num_scored - standing.score) / (group.num_scored - 1)
    return turn_return - mean_of_others


def estimate_reinforce_plus_plus(turn_return: float, standing: Standing) -> float:
    """(return - mean) / (deviation over the batch + 1e-6): REINFORCE++ (arXiv 2501.03262), the mean
    being the group's, or the batch's."""
    return (turn_return - standing.group.mean) / (standing.batch_deviation + DEVIATION_EPSILON)


def estimate_maxrl(turn_return: float, standing: Standing) -> float:
    """(return - group mean) / group mean: MaxRL (arXiv 2602.02710).

    With rewards of 0 and 1 the group's gradient is then the mean score function of its successes
    minus that of all: an estimate of the gradient of the logarithm of the success probability.
    """
    return (turn_return - standing.group.mean) / standing.group.mean


_ESTIMATORS: Mapping[type, Estimator] = {
    GrpoAdvantageConfig: estimate_grpo,
    DrGrpoAdvantageConfig: estimate_dr_grpo,
    RlooAdvantageConfig: estimate_rloo,
    ReinforcePlusPlusAdvantageConfig: estimate_reinforce_plus_plus,
    MaxRlAdvantageConfig: estimate_maxrl,
}


def _rank(trajectories: Sequence[Trajectory], config: AdvantageConfig) -> list[Standing | None]:
    """The standing of each trajectory; None: it is unscored, or its group's scores are equal."""
    groups = compute_group_statistics(trajectories)
    scores = [compute_score(trajectory) for trajectory in trajectories]
    if isinstance(config, ReinforcePlusPlusAdvantageConfig) and config.baseline == "batch":
        of_batch = compute_statistics([score for score in scores if score is not None])
        groups = dict.fromkeys(groups, of_batch)
    own_groups = [groups[trajectory.group_id] for trajectory in trajectories]
    centered = [
        score - group.mean
        for score, group in zip(scores, own_groups, strict=True)
        if score is not None
    ]
    deviation = compute_statistics(centered).deviation
    return [
        Standing(score, group, deviation) if score is not None and group.has_signal else None
        for score, group in zip(scores, own_groups, strict=True)
    ]


def _check_not_negative(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        score = compute_score(trajectory)
        if score is not None and score < 0.0:
            raise RunError(
                f"trajectory {trajectory.id} has the score {score:g}: "
                "train.algorithm.advantage.kind maxrl divides by the mean score of a group. "
                "Allowed: rewards of 0 and above. "
                "Type train.algorithm.advantage.kind=grpo, or change the reward function"
            )
