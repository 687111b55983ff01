"""What a token counts, by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agentrl_cli.train.aggregation import compute_token_weights
from agentrl_cli.train.samples import Sample, build_scoring_sample


def sample(trajectory_index: int, num_targets: int) -> Sample:
    built = build_scoring_sample([1] * (num_targets + 1), 1, temperature=1.0, top_p=1.0)
    return dataclasses.replace(built, trajectory_index=trajectory_index)


#: Trajectory 0 broke into two samples of 1 and 4 tokens, trajectory 2 has one of 6; trajectory 1
#: has none.
SAMPLES = [sample(0, 1), sample(2, 6), sample(0, 4)]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # 1 + 6 + 4 tokens.
        ("token_mean", [1 / 11, 1 / 11, 1 / 11]),
        # Three samples.
        ("sequence_mean", [1 / 3, 1 / 18, 1 / 12]),
        # Three trajectories; the first has 1 + 4 tokens.
        ("trajectory_mean", [1 / 15, 1 / 18, 1 / 15]),
        # Three trajectories x 7 tokens.
        ("constant", [1 / 21, 1 / 21, 1 / 21]),
    ],
)
def test_weights(aggregation: Any, expected: list[float]):
    weights = compute_token_weights(aggregation, SAMPLES, 3, 7.0)
    assert [weights[id(s)] for s in SAMPLES] == pytest.approx(expected)
    assert len(weights) == 3


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean", "trajectory_mean", "constant"]
)
def test_nothing_to_weigh(aggregation: Any):
    assert compute_token_weights(aggregation, [], 2, 7.0) == {}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_weights_of_all_tokens_add_up_to_one(aggregation: Any):
    weights = compute_token_weights(aggregation, SAMPLES, 3, 7.0)
    assert sum(weights[id(s)] * s.num_targets for s in SAMPLES) == pytest.approx(1.0)


def test_every_trajectory_weighs_the_same():
    weights = compute_token_weights("trajectory_mean", [*SAMPLES, sample(1, 9)], 3, 7.0)
    ones = [*SAMPLES]
    first = sum(weights[id(s)] * s.num_targets for s in ones if s.trajectory_index == 0)
    third = sum(weights[id(s)] * s.num_targets for s in ones if s.trajectory_index == 2)
    assert first == pytest.approx(third) == pytest.approx(1 / 3)
