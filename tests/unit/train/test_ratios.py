"""Ratios and the rollout correction against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.algorithm import RolloutCorrectionConfig
from agentrl_cli.train.ratios import (
    RolloutCorrection,
    compute_log_ratio,
    compute_rollout_correction,
    sum_over_sequences,
)


def tensor(values: list[float], **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def correct(
    ratios: list[float], sequences: list[int] | None = None, **config: Any
) -> RolloutCorrection:
    """``ratios`` are proximal / rollout."""
    proximal = tensor([-1.0] * len(ratios), requires_grad=True)
    return compute_rollout_correction(
        proximal,
        proximal.detach() - tensor(ratios).log(),
        torch.tensor(sequences or [0] * len(ratios)),
        RolloutCorrectionConfig.model_validate(config),
    )


def test_log_ratios_stay_within_twenty():
    log_ratio = compute_log_ratio(tensor([0.0, -500.0, -1.0]), tensor([-500.0, 0.0, -1.5]))
    assert log_ratio.tolist() == [20.0, -20.0, 0.5]


def test_sums_over_sequences_that_lie_mixed():
    summed = sum_over_sequences(tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 2]))
    assert summed.tolist() == [5.0, 2.0, 5.0, 8.0]


@pytest.mark.parametrize(
    ("config", "weights", "dropped"),
    [
        # Raw weights 4, 2, 1, 0.5, 0.1.
        ({}, [2.0, 2.0, 1.0, 0.5, 0.1], []),
        ({"cap": 3.0}, [3.0, 2.0, 1.0, 0.5, 0.1], []),
        ({"floor": 0.4}, [2.0, 2.0, 1.0, 0.5, 0.4], []),
        # On the bound is inside.
        ({"mode": "mask", "floor": 1.0, "cap": 1.0}, [0.0, 0.0, 1.0, 0.0, 0.0], [0, 1, 3, 4]),
        ({"mode": "mask", "cap": 2.1}, [0.0, 2.0, 1.0, 0.5, 0.1], [0]),
        ({"mode": "mask", "floor": 0.2, "cap": 5.0}, [4.0, 2.0, 1.0, 0.5, 0.0], [4]),
        ({"mode": "mask", "floor": 0.6, "cap": 1.5}, [0.0, 0.0, 1.0, 0.0, 0.0], [0, 1, 3, 4]),
    ],
)
def test_token_weights(config: dict[str, Any], weights: list[float], dropped: list[int]):
    correction = correct([4.0, 2.0, 1.0, 0.5, 0.1], **config)
    assert correction.weights.tolist() == pytest.approx(weights)
    assert correction.raw_weights.tolist() == pytest.approx([4.0, 2.0, 1.0, 0.5, 0.1])
    assert correction.is_dropped.nonzero()[:, 0].tolist() == dropped
    assert correction.is_dropped.dtype == torch.bool
    assert not correction.weights.requires_grad


@pytest.mark.parametrize(
    ("config", "weights", "dropped"),
    [
        # Sequence 0: 1.5 x 2 = 3; sequence 1: 0.5 x 0.5 = 0.25.
        ({}, [2.0, 0.25, 2.0, 0.25], []),
        ({"cap": 4.0, "floor": 0.5}, [3.0, 0.5, 3.0, 0.5], []),
        ({"mode": "mask"}, [0.0, 0.25, 0.0, 0.25], [0, 2]),
        ({"mode": "mask", "cap": 3.1, "floor": 0.3}, [3.0, 0.0, 3.0, 0.0], [1, 3]),
    ],
)
def test_sequence_weights_are_products(
    config: dict[str, Any], weights: list[float], dropped: list[int]
):
    correction = correct([1.5, 0.5, 2.0, 0.5], [0, 1, 0, 1], level="sequence", **config)
    assert correction.weights.tolist() == pytest.approx(weights)
    assert correction.raw_weights.tolist() == pytest.approx([3.0, 0.25, 3.0, 0.25])
    assert correction.is_dropped.nonzero()[:, 0].tolist() == dropped


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_finite(level: str):
    proximal, rollout = tensor([-1.0, -900.0]), tensor([-900.0, -1.0])
    config = RolloutCorrectionConfig.model_validate({"level": level})
    numbers = torch.tensor([0, 1])
    correction = compute_rollout_correction(proximal, rollout, numbers, config)
    assert correction.raw_weights.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)])


def test_without_a_correction_every_weight_is_one():
    correction = compute_rollout_correction(
        tensor([-1.0, -2.0]), tensor([-3.0, -1.0]), torch.tensor([0, 0]), None
    )
    assert correction.weights.tolist() == [1.0, 1.0]
    assert correction.raw_weights.tolist() == [1.0, 1.0]
    assert correction.is_dropped.tolist() == [False, False]
    assert correction.is_dropped.dtype == torch.bool
