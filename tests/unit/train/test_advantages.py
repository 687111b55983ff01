"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import pytest

from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.scores import compute_group_statistics, compute_score
from agentrl_cli.train.advantages import compute_advantages


def trajectory(
    name: str, returns: list[float | None], reward: float | None = 0.0, group: str = "g"
) -> Trajectory:
    return Trajectory(
        id=name,
        group_id=group,
        task_id=group,
        reward=reward,
        interactions=tuple(
            Interaction(id=f"{name}{turn}", turn_return=value) for turn, value in enumerate(returns)
        ),
    )


def test_two_single_turns():
    # Scores 0 and 1: mean 1/2, deviation sqrt((1/4 + 1/4) / (2 - 1)) = sqrt(1/2).
    # Advantages -+ (1/2) / (sqrt(1/2) + 1e-6) = -+ 0.70710578 (0.70710678 without epsilon).
    advantages = compute_advantages([trajectory("a", [0.0]), trajectory("b", [1.0])])
    assert advantages["a0"] == pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-6), rel=1e-12)
    assert advantages["b0"] == pytest.approx(0.7071057812, abs=1e-9)


def test_a_long_trajectory_weighs_as_much_as_a_short_one():
    # a has three turns of return 1, b one turn of 0: scores 1 and 0, mean 1/2. Over rows the
    # mean would be 3/4.
    statistics = compute_group_statistics(
        [trajectory("a", [1.0, 1.0, 1.0]), trajectory("b", [0.0])]
    )["g"]
    assert statistics.mean == 0.5
    assert statistics.deviation == pytest.approx(math.sqrt(0.5), rel=1e-12)


def test_turns_with_returns_of_their_own():
    # a: returns 3, 1 -> score 2; b: 0 -> score 0; mean 1, deviation sqrt(1 + 1) = sqrt 2.
    # Advantages: (3 - 1) / sqrt 2 = 1.41421, (1 - 1) / sqrt 2 = 0, (0 - 1) / sqrt 2 = -0.70711.
    advantages = compute_advantages([trajectory("a", [3.0, 1.0]), trajectory("b", [0.0])])
    assert advantages == pytest.approx({"a0": 1.41421, "a1": 0.0, "b0": -0.70711}, abs=1e-5)


def test_turns_without_a_return_are_left_out_of_the_score():
    # The failed call in the middle counts neither as 0 nor as a turn: the score stays 1.
    assert compute_score(trajectory("a", [1.0, None, 1.0])) == 1.0
    advantages = compute_advantages([trajectory("a", [1.0, None]), trajectory("b", [0.0])])
    assert advantages["a1"] == 0.0
    assert advantages["a0"] > 0.7


@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_an_unscored_trajectory_is_out_of_mean_and_deviation(missing: float | None):
    batch = [
        trajectory("a", [0.0]),
        trajectory("b", [1.0]),
        trajectory("c", [1000.0], reward=missing),
    ]
    with_it, without = compute_advantages(batch), compute_advantages(batch[:2])
    assert with_it == without | {"c0": 0.0}
    assert compute_group_statistics(batch)["g"].num_scored == 2


def test_a_return_that_is_not_finite_unscores_its_trajectory_alone():
    batch = [trajectory("a", [0.0]), trajectory("b", [1.0]), trajectory("c", [math.nan])]
    advantages = compute_advantages(batch)
    assert advantages["c0"] == 0.0
    assert advantages["b0"] == pytest.approx(0.70711, abs=1e-5)


def test_a_trajectory_without_calls_still_is_a_baseline():
    # Its reward 1 makes the mean (0 + 1) / 2.
    batch = [trajectory("a", [0.0]), trajectory("b", [], reward=1.0)]
    assert compute_group_statistics(batch)["g"].mean == 0.5


@pytest.mark.parametrize(
    "scores",
    [
        [0.7],
        [1.0, 1.0, 1.0],
        [0.0, 0.0],
        # The same sum in two orders: 0.6000000000000001 and 0.6.
        [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1],
        [1e12 / 3.0, 1e12 / 3.0 * (1 + 2e-16)],
    ],
)
def test_one_or_equal_scores_have_advantage_exactly_zero(scores: list[float]):
    batch = [trajectory(f"t{index}", [score]) for index, score in enumerate(scores)]
    assert set(compute_advantages(batch).values()) == {0.0}
    assert not compute_group_statistics(batch)["g"].has_signal


def test_small_but_real_differences_are_signal():
    batch = [trajectory("a", [1.0]), trajectory("b", [1.001])]
    # Deviation 0.001 / sqrt 2 = 7.07e-4; advantage 0.0005 / 7.081e-4 = 0.706.
    assert compute_advantages(batch)["b0"] == pytest.approx(0.7061, abs=1e-3)


def test_groups_are_keyed_by_id_not_by_position():
    batch = [
        trajectory("a", [0.0], group="x"),
        trajectory("b", [5.0], group="y"),
        trajectory("c", [1.0], group="x"),
        trajectory("d", [5.0], group="y"),
    ]
    advantages = compute_advantages(batch)
    assert advantages["a0"] == -advantages["c0"] != 0.0
    assert advantages["b0"] == advantages["d0"] == 0.0


def test_shifting_and_scaling_rewards_changes_little():
    raw = [0.0, 1.0, 0.25, 0.5]
    plain = compute_advantages([trajectory(f"t{i}", [r]) for i, r in enumerate(raw)])
    moved = compute_advantages([trajectory(f"t{i}", [100 + 8 * r]) for i, r in enumerate(raw)])
    assert plain == pytest.approx(moved, abs=1e-4)
    assert sum(plain.values()) == pytest.approx(0.0, abs=1e-9)
