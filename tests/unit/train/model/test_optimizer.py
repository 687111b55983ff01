"""The learning rate by hand, and master weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.train.model.optimizer import MasterOptimizer, compute_learning_rate


def rates(steps: list[int], **settings: Any) -> list[float]:
    config = TrainConfig.model_validate({"learning_rate": 1.0, "total_steps": 10, **settings})
    return [compute_learning_rate(config, step) for step in steps]


def test_warm_up_rises_from_the_first_step():
    assert rates([1, 2, 4, 5, 10], warmup_steps=4) == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert rates([1], warmup_steps=0) == [1.0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Warm-up ends at 2; steps 4, 6, 10, 12 are 1/4, 1/2, 1 and beyond of the decay to 0.2.
        ("linear", [0.8, 0.6, 0.2, 0.2]),
        # 0.2 + 0.4 (1 + cos(pi / 4)) = 0.88284; 0.2 + 0.4 = 0.6.
        ("cosine", [0.88284, 0.6, 0.2, 0.2]),
    ],
)
def test_decays(schedule: str, expected: list[float]):
    found = rates(
        [4, 6, 10, 12], warmup_steps=2, learning_rate_schedule=schedule, min_learning_rate=0.2
    )
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_floor_above_the_peak_does_not_raise_it():
    found = rates([10], learning_rate_schedule="linear", min_learning_rate=5.0)
    assert found == [1.0]


def build(dtype: torch.dtype, **settings: Any) -> tuple[nn.Linear, MasterOptimizer]:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.copy_(torch.tensor([0.5]))
    config = TrainConfig.model_validate({"learning_rate": 0.1, **settings})
    return model, MasterOptimizer(model, config, dtype)


def backward(model: nn.Linear, row: list[float]) -> None:
    model(torch.tensor([row], dtype=model.weight.dtype)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_micro_batches_add_up_and_are_clipped(dtype: torch.dtype):
    # d/dw = the inputs, d/db = 1: twice (3, 0) and 1 gives (6, 0), 2: norm sqrt 40 = 6.3246.
    model, optimizer = build(dtype, max_grad_norm=1.0)
    backward(model, [3.0, 0.0])
    backward(model, [3.0, 0.0])
    assert optimizer.clip_gradients() == pytest.approx(6.3246, abs=1e-4)
    gradients = [p.grad for p in optimizer._masters.values()]
    assert all(g is not None and g.dtype == torch.float32 for g in gradients)
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(1.0, abs=1e-5)


def test_small_gradients_are_not_lost_beside_large_ones():
    """256 + 1 is 256 in bfloat16: in the masters it must be 257."""
    model, optimizer = build(torch.bfloat16)
    for value in (256.0, 1.0):
        backward(model, [value, 0.0])
    assert optimizer._masters["weight"].grad.tolist() == [[257.0, 0.0]]
    assert model.weight.grad is None


def test_first_step_by_hand_and_decay_of_matrices_alone():
    # AdamW's first step is lr x sign(gradient), after decay by 1 - lr x weight_decay:
    # 1 x (1 - 0.1 x 0.5) - 0.1 = 0.85; gradient 0 leaves -2 x 0.95 = -1.9; the bias does not
    # decay: 0.5 - 0.1 = 0.4.
    model, optimizer = build(torch.float32, weight_decay=0.5)
    backward(model, [2.0, 0.0])
    optimizer.step(0.1)
    assert model.weight.tolist()[0] == pytest.approx([0.85, -1.9], abs=1e-6)
    assert model.bias.tolist() == pytest.approx([0.4], abs=1e-6)
    assert model.weight.grad is None


def test_a_gradient_that_is_not_finite_is_reported_and_left():
    model, optimizer = build(torch.float32)
    backward(model, [float("inf"), 1.0])
    assert optimizer.clip_gradients() == float("inf")
    assert model.weight.grad.tolist() == [[float("inf"), 1.0]]


def test_frozen_weights_have_no_master():
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = MasterOptimizer(model, TrainConfig(), torch.bfloat16)
    assert optimizer.master_weights().keys() == {"weight"}
    assert model.bias.dtype == torch.bfloat16
