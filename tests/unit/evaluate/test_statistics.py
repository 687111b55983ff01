from __future__ import annotations

import itertools
import math
import random

import pytest

from agentrl_cli.evaluate.eval_report import (
    compute_clustered_interval,
    compute_pass_at_k,
    compute_reward_interval,
    compute_t_quantile,
)


def test_one_value_a_cluster_is_the_ordinary_t_interval() -> None:
    # 1, 2, 3, 4: mean 2.5, sample variance 5/3, standard error sqrt(5/12) = 0.645497,
    # t(0.975, 3) = 3.182446 -> margin 2.054260
    low, high = compute_clustered_interval([[1.0], [2.0], [3.0], [4.0]]) or (0, 0)
    assert (low + high) / 2 == pytest.approx(2.5)
    assert (high - low) / 2 == pytest.approx(2.054260, rel=3e-3)


def test_copies_of_an_attempt_add_no_certainty() -> None:
    once = compute_clustered_interval([[0.0], [1.0], [1.0]])
    copied = compute_clustered_interval([[0.0] * 8, [1.0] * 8, [1.0] * 8])
    assert copied == pytest.approx(once)


def test_unequal_clusters_by_hand() -> None:
    # Clusters {0, 0, 1} and {1}: N = 4, m = 0.5; sums of residuals -0.5 and 0.5;
    # variance = 2/1 x (0.25 + 0.25) / 16 = 0.0625, error 0.25, t(0.975, 1) = 12.706205
    low, high = compute_clustered_interval([[0.0, 0.0, 1.0], [1.0]]) or (0, 0)
    assert low == pytest.approx(0.5 - 0.25 * 12.706205)
    assert high == pytest.approx(0.5 + 0.25 * 12.706205)


@pytest.mark.parametrize(
    ("clusters", "low", "high"),
    [
        # Ten of ten passed, t(0.975, 9) = 2.262157: 10 / (10 + t^2) and 1.
        ([[1.0]] * 10, 10 / (10 + 2.262157**2), 1.0),
        ([[0.0]] * 10, 0.0, 2.262157**2 / (10 + 2.262157**2)),
        # p = 0.5, variance 0.0625 as below, so n = 4; t(0.975, 1) = 12.706205, t^2 / n = 40.36.
        ([[0.0, 0.0, 1.0], [1.0]], 0.006072, 0.993928),
        # Outside of 0 to 1 it is the t interval, and equal partial rewards are all there is.
        ([[1.0], [2.0], [3.0], [4.0]], 0.448212, 4.551788),
        ([[0.5], [0.5]], 0.5, 0.5),
    ],
)
def test_the_interval_of_rewards_stays_in_their_range(
    clusters: list[list[float]], low: float, high: float
) -> None:
    assert compute_reward_interval(clusters) == pytest.approx((low, high), rel=3e-3, abs=1e-4)


def test_intervals_near_the_edges_stay_inside_and_cover_the_truth() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(500):
        clusters = [[float(rng.random() < 0.97)] for _ in range(30)]
        low, high = compute_reward_interval(clusters) or (-1, 2)
        assert 0.0 <= low < high <= 1.0
        covered += low <= 0.97 <= high
    assert covered >= 465


def test_fewer_than_two_clusters_have_no_interval() -> None:
    assert compute_clustered_interval([]) is None
    assert compute_clustered_interval([[1.0, 0.0]]) is None
    assert compute_clustered_interval([[1.0], []]) is None


def test_the_interval_covers_the_truth_in_95_of_100() -> None:
    """Tasks of very different difficulty, 4 attempts each: the naive interval covers ~75 %."""
    rng = random.Random(0)
    covered = covered_in_range = 0
    for _ in range(1000):
        difficulties = [rng.choice([0.1, 0.9]) for _ in range(25)]
        clusters = [[float(rng.random() < p) for _ in range(4)] for p in difficulties]
        low, high = compute_clustered_interval(clusters) or (0, 0)
        covered += low <= 0.5 <= high
        low, high = compute_reward_interval(clusters) or (0, 0)
        covered_in_range += low <= 0.5 <= high
    assert 930 <= covered <= 970
    assert 930 <= covered_in_range <= 970


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (5, 2.5706),
        (10, 2.2281),
        (30, 2.0423),
        (500, 1.9647),
    ],
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert compute_t_quantile(0.975, degrees) == pytest.approx(expected, rel=2.5e-3)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    passed = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(passed, k))
        truth = sum(any(s) for s in subsets) / len(subsets)
        assert compute_pass_at_k({"a": passed}, k) == pytest.approx(truth)


def test_pass_at_k_averages_over_tasks_with_enough_attempts() -> None:
    outcomes = {"a": [True, True], "b": [False, False], "c": [True]}
    assert compute_pass_at_k(outcomes, 1) == pytest.approx(2 / 3)
    assert compute_pass_at_k(outcomes, 2) == pytest.approx(0.5)
    assert compute_pass_at_k(outcomes, 3) is None
    assert compute_pass_at_k({}, 1) is None


def test_pass_at_k_of_many_attempts_is_finite() -> None:
    value = compute_pass_at_k({"a": [True] + [False] * 9999}, 100)
    assert value == pytest.approx(0.01)
    assert math.isfinite(value or math.inf)
