"""Losses and their gradients against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.algorithm import GrpoConfig
from agentrl_cli.train.losses import (
    LossInputs,
    LossOutput,
    compute_clipped_objective,
    compute_importance_weights,
    compute_k3,
    compute_log_ratio,
    compute_loss,
    compute_token_weights,
)

LOG_2 = math.log(2.0)


def tensor(values: list[float], **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def loss_of(
    new: Tensor,
    *,
    proximal: list[float] | None = None,
    rollout: list[float] | None = None,
    advantages: list[float],
    weights: list[float] | None = None,
    ref: list[float] | None = None,
    **algorithm: Any,
) -> LossOutput:
    """compute_loss with defaults: on policy, everything trained, weight 1 per token."""
    proximal_logprobs = new.detach() if proximal is None else tensor(proximal)
    return compute_loss(
        LossInputs(
            new_logprobs=new,
            proximal_logprobs=proximal_logprobs,
            rollout_logprobs=proximal_logprobs if rollout is None else tensor(rollout),
            advantages=tensor(advantages),
            token_weights=tensor([1.0] * len(new) if weights is None else weights),
            ref_logprobs=None if ref is None else tensor(ref),
        ),
        GrpoConfig.model_validate(algorithm),
    )


def gradient_of(new: Tensor, **options: Any) -> list[float]:
    new = new.detach().requires_grad_()
    loss_of(new, **options).loss.backward()
    assert new.grad is not None
    return new.grad.tolist()


def test_on_policy_loss_is_minus_the_advantages():
    # r = 1 and w = 1: loss -2 - (-3) = 1; d(-r A)/d new = -r A = -A.
    new = tensor([-1.0, -2.0])
    output = loss_of(new, advantages=[2.0, -3.0])
    assert output.loss.item() == pytest.approx(1.0)
    assert gradient_of(new, advantages=[2.0, -3.0]) == pytest.approx([-2.0, 3.0])
    assert output.sums["approx_kl"].item() == 0.0
    assert output.sums["clipfrac"].item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        # Range [0.8, 1.28]. Outside it on the side that the advantage pushes to: clipped, flat.
        (2.0, 1.0, 1.28, 0.0),
        (0.5, -1.0, -0.8, 0.0),
        # Outside on the other side: the minimum takes the unclipped term, slope r A.
        (0.5, 1.0, 0.5, 0.5),
        (2.0, -1.0, -2.0, -2.0),
        # Inside.
        (1.1, 3.0, 3.3, 3.3),
        (0.9, -2.0, -1.8, -1.8),
        # No advantage, no objective.
        (2.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_objective(ratio: float, advantage: float, objective: float, slope: float):
    log_ratio = tensor([math.log(ratio)], requires_grad=True)
    found = compute_clipped_objective(log_ratio, tensor([advantage]), clip_low=0.2, clip_high=0.28)
    found.sum().backward()
    assert found.item() == pytest.approx(objective)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        # c = 3: min(r A, clip A) = -5 x 1, bounded below by 3 x -1 = -3, flat.
        (5.0, -1.0, -3.0, 0.0),
        # -2 is above the bound: as without it.
        (2.0, -1.0, -2.0, -2.0),
        # For positive advantages max(.., c A) would be 3: it must not apply.
        (1.0, 1.0, 1.0, 1.0),
        (5.0, 1.0, 1.2, 0.0),
    ],
)
def test_dual_clip_is_for_negative_advantages(
    ratio: float, advantage: float, objective: float, slope: float
):
    log_ratio = tensor([math.log(ratio)], requires_grad=True)
    found = compute_clipped_objective(
        log_ratio, tensor([advantage]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    found.sum().backward()
    assert found.item() == pytest.approx(objective)
    assert log_ratio.grad is not None
    assert log_ratio.grad.item() == pytest.approx(slope)


def test_decoupled_loss_clips_on_proximal_and_weighs_by_rollout():
    # new -1, proximal -1 - ln 1.1: r = 1.1; rollout = proximal - ln 1.5: w = 1.5.
    # Token 1 (A = 2): -1.5 x 1.1 x 2 = -3.3, gradient -3.3.
    # Token 2: r = 2 clipped at 1.2, w = min(4, cap 2) = 2: -2 x 1.2 x 1 = -2.4, gradient 0.
    # Token 3: r = 1, w = 0.5: -0.5 x 1 x (-1) = 0.5, gradient 0.5.
    new = tensor([-1.0, -1.0, -1.0])
    proximal = [-1.0 - math.log(1.1), -1.0 - LOG_2, -1.0]
    options: dict[str, Any] = {
        "proximal": proximal,
        "rollout": [proximal[0] - math.log(1.5), proximal[1] - 2 * LOG_2, proximal[2] + LOG_2],
        "advantages": [2.0, 1.0, -1.0],
    }
    output = loss_of(new, **options)
    assert output.loss.item() == pytest.approx(-3.3 - 2.4 + 0.5)
    assert gradient_of(new, **options) == pytest.approx([-3.3, 0.0, 0.5])
    # Statistics: one of three is clipped; gaps ln 1.5, 2 ln 2, ln 2; k3 of r = 1.1 and 2:
    # (0.1 - 0.0953) + (1 - 0.6931).
    assert output.sums["clipfrac"].item() == 1.0
    assert output.sums["logprob_gap"].item() == pytest.approx(math.log(1.5) + 3 * LOG_2)
    assert output.logprob_gap_max.item() == pytest.approx(2 * LOG_2)
    assert output.sums["approx_kl"].item() == pytest.approx(0.1 - math.log(1.1) + 1 - LOG_2)


def test_importance_weights_have_no_gradient_and_a_cap():
    proximal = tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = tensor([-1.0 - LOG_2, -50.0, 0.0])
    weights = compute_importance_weights(proximal, rollout, 5.0)
    # exp(ln 2) = 2; exp(49) capped at 5; exp(-1).
    assert weights.tolist() == pytest.approx([2.0, 5.0, math.exp(-1.0)])
    assert not weights.requires_grad


def test_k3_by_hand():
    # ref - new = ln 2: 2 - ln 2 - 1 = 0.30685, d/d new = -(2 - 1) = -1 (1 - ref/new ratio).
    # ref - new = -ln 2: 1/2 + ln 2 - 1 = 0.19315, d/d new = 1 - 1/2 = 1/2. Equal: 0 and 0.
    new = tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ref = tensor([-1.0 + LOG_2, -1.0 - LOG_2, -1.0])
    kl = compute_k3(new, ref)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([1 - LOG_2, LOG_2 - 0.5, 0.0])
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-1.0, 0.5, 0.0])


def test_kl_is_added_per_token_before_aggregation():
    # Token 1: -1 x 1 + 0.5 x (1 - ln 2); token 2: 0.5 x 0. Weights 1/4 and 3/4.
    new = tensor([-1.0, -1.0])
    output = loss_of(
        new,
        advantages=[1.0, 0.0],
        weights=[0.25, 0.75],
        ref=[-1.0 + LOG_2, -1.0],
        kl_coef=0.5,
    )
    assert output.loss.item() == pytest.approx(0.25 * (-1.0 + 0.5 * (1.0 - LOG_2)))
    assert output.sums["kl"].item() == pytest.approx(1.0 - LOG_2)
    with pytest.raises(ValueError, match="ref_logprobs"):
        loss_of(new, advantages=[1.0, 0.0], kl_coef=0.5)


def test_log_ratios_stay_within_twenty():
    log_ratio = compute_log_ratio(tensor([0.0, -500.0]), tensor([-500.0, 0.0]))
    assert log_ratio.tolist() == [20.0, -20.0]
    # r = exp(20), unclipped because A < 0: the loss is exp(20), large and finite.
    output = loss_of(tensor([0.0]), proximal=[-500.0], advantages=[-1.0])
    assert output.loss.item() == pytest.approx(math.exp(20.0))


def test_nothing_trained_is_a_loss_of_zero_with_a_path_for_gradients():
    new = tensor([], requires_grad=True)
    output = loss_of(new, advantages=[])
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert output.logprob_gap_max.item() == 0.0
    assert new.grad is not None


def test_gradient_against_finite_differences():
    generator = torch.Generator().manual_seed(3)

    def draw() -> Tensor:
        return -3 * torch.rand(24, generator=generator, dtype=torch.float64)

    proximal, rollout, ref, advantages = draw(), draw(), draw(), draw() + 1.5
    algorithm = GrpoConfig(kl_coef=0.2, dual_clip=2.0, clip_high=0.28, importance_cap=1.5)

    def loss(new: Tensor) -> Tensor:
        inputs = LossInputs(
            new_logprobs=new, proximal_logprobs=proximal, rollout_logprobs=rollout,
            advantages=advantages, ref_logprobs=ref,
            token_weights=torch.full_like(new, 1 / 19),
        )  # fmt: skip
        return compute_loss(inputs, algorithm).loss

    new = draw().requires_grad_()
    loss(new).backward()
    assert new.grad is not None
    with torch.no_grad():
        for place in range(24):
            nudge = torch.zeros_like(new)
            nudge[place] = 1e-6
            difference = (loss(new + nudge) - loss(new - nudge)) / 2e-6
            assert new.grad[place].item() == pytest.approx(difference.item(), abs=1e-7)


def test_token_weights_by_hand():
    # 1 + 3 + 0 tokens: 1/4 each.
    assert compute_token_weights("token_mean", [1, 3, 0], 9.0) == [0.25, 0.25, 0.25]
    # Three trajectories: 1/3 x 1, 1/3 x 1/3; one without tokens has no share to give.
    assert compute_token_weights("trajectory_mean", [1, 3, 0], 9.0)[:2] == pytest.approx(
        [1 / 3, 1 / 9]
    )
    # Three trajectories x 9.
    assert compute_token_weights("constant", [1, 3, 0], 9.0) == pytest.approx([1 / 27] * 3)
    assert compute_token_weights("constant", [], 9.0) == []
    assert compute_token_weights("token_mean", [0], 9.0) == [1.0]


def test_parts_add_up_to_the_whole():
    new = tensor([-1.0, -2.0, -0.5, -1.5])
    options: dict[str, Any] = {"kl_coef": 0.1}
    columns = {
        "proximal": [-1.1, -1.9, -0.5, -1.0],
        "rollout": [-1.2, -1.5, -0.7, -1.0],
        "advantages": [1.0, -1.0, 2.0, -2.0],
        "weights": [0.1, 0.2, 0.3, 0.4],
        "ref": [-1.0, -1.0, -1.0, -1.0],
    }
    whole = loss_of(new, **columns, **options)
    parts = [
        loss_of(new[cut], **{name: values[cut] for name, values in columns.items()}, **options)
        for cut in (slice(0, 1), slice(1, 4))
    ]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    for name, value in whole.sums.items():
        assert sum(p.sums[name].item() for p in parts) == pytest.approx(value.item())
