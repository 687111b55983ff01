"""Scores of trajectories, and their statistics, by hand."""

from __future__ import annotations

import math

import pytest

from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.scores import (
    GroupStatistics,
    compute_group_statistics,
    compute_score,
    compute_statistics,
)


def trajectory(group: str, returns: list[float], reward: float | None = 0.0) -> Trajectory:
    turns = tuple(Interaction(id=str(n), turn_return=value) for n, value in enumerate(returns))
    return Trajectory(id=group, group_id=group, task_id=group, reward=reward, interactions=turns)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([], GroupStatistics(0.0, 0.0, 0)),
        ([0.0], GroupStatistics(0.0, 0.0, 1)),
        ([2.5], GroupStatistics(2.5, 0.0, 1)),
        ([3.0, 3.0, 3.0], GroupStatistics(3.0, 0.0, 3)),
        # Squares 4 + 0 + 4, over n - 1 = 2.
        ([1.0, 3.0, 5.0], GroupStatistics(3.0, 2.0, 3)),
        # They differ although they add up to nothing.
        ([-1.0, 1.0], GroupStatistics(0.0, math.sqrt(2.0), 2)),
        ([-5.0, -3.0, -1.0], GroupStatistics(-3.0, 2.0, 3)),
    ],
)
def test_statistics(scores: list[float], expected: GroupStatistics):
    found = compute_statistics(scores)
    assert found == expected
    assert found.has_signal is (expected.deviation > 0.0)


def test_scores_whose_squares_no_number_holds():
    statistics = compute_statistics([0.0, 2e200])
    assert statistics.mean == 1e200
    assert statistics.deviation == pytest.approx(math.sqrt(2.0) * 1e200)


def test_equal_is_by_the_size_of_the_scores():
    assert not compute_statistics([1e6, 1e6 + 1e-4]).has_signal
    assert compute_statistics([1.0, 1.0 + 1e-4]).has_signal
    assert compute_statistics([1e-6, 2e-6]).has_signal


def test_statistics_of_every_group():
    batch = [
        trajectory("x", [2.0, 0.0]),
        trajectory("y", [7.0], reward=None),
        trajectory("x", [3.0]),
    ]
    assert compute_group_statistics(batch) == {
        "x": GroupStatistics(2.0, math.sqrt(2.0), 2),
        "y": GroupStatistics(0.0, 0.0, 0),
    }


@pytest.mark.parametrize(
    ("returns", "reward", "score"),
    [
        ([1.0, 2.0], 9.0, 1.5),
        ([], 9.0, None),
        ([1.0], None, None),
        ([1.0], math.inf, None),
        ([math.nan], 1.0, None),
        ([math.inf, -math.inf], 1.0, None),
    ],
)
def test_scores(returns: list[float], reward: float | None, score: float | None):
    assert compute_score(trajectory("g", returns, reward)) == score
