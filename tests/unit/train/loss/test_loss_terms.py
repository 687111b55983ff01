"""The loss of some targets: its terms put together, weighted, and counted, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.algorithm_config import AlgorithmConfig
from agentrl_cli.train.loss.policy_loss import LossInputs, LossOutput, compute_loss

LOG_2 = math.log(2.0)


def tensor(values: list[float], **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def loss_of(
    new: Tensor,
    *,
    proximal: list[float] | None = None,
    rollout: list[float] | None = None,
    on_policy: list[bool] | None = None,
    advantages: list[float],
    weights: list[float] | None = None,
    sequences: list[int] | None = None,
    ref: list[float] | None = None,
    entropies: Tensor | None = None,
    **algorithm: Any,
) -> LossOutput:
    """compute_loss with defaults: no token is of the newest policy version, the rollout logprobs
    are the proximal ones, everything is trained, weight 1 per token."""
    proximal_logprobs = new.detach() if proximal is None else tensor(proximal)
    return compute_loss(
        LossInputs(
            new_logprobs=new,
            proximal_logprobs=proximal_logprobs,
            rollout_logprobs=proximal_logprobs if rollout is None else tensor(rollout),
            is_on_policy=torch.tensor(on_policy or [False] * len(new), dtype=torch.bool),
            advantages=tensor(advantages),
            sequence_numbers=torch.tensor(sequences or [0] * len(new), dtype=torch.long),
            token_weights=tensor([1.0] * len(new) if weights is None else weights),
            ref_logprobs=None if ref is None else tensor(ref),
            entropies=entropies,
        ),
        AlgorithmConfig.model_validate(algorithm),
    )


def gradient_of(new: Tensor, **options: Any) -> list[float]:
    new = new.detach().requires_grad_()
    loss_of(new, **options).loss.backward()
    assert new.grad is not None
    return new.grad.tolist()


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
    # (0.1 - 0.0953) + (1 - 0.6931); weights 1.5, 2, 0.5, the second 4 before its cap.
    assert output.sums["clipfrac"].item() == 1.0
    assert output.sums["logprob_gap"].item() == pytest.approx(math.log(1.5) + 3 * LOG_2)
    assert output.maxima["logprob_gap"].item() == pytest.approx(2 * LOG_2)
    assert output.sums["approx_kl"].item() == pytest.approx(0.1 - math.log(1.1) + 1 - LOG_2)
    assert output.sums["importance_weight"].item() == pytest.approx(4.0)
    assert output.sums["importance_weight_squared"].item() == pytest.approx(2.25 + 4 + 0.25)
    assert output.sums["importance_weight_clipped"].item() == 1.0
    assert output.maxima["importance_weight"].item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("algorithm", "slopes"),
    [
        ({}, [1.25, 0.5, 1.0]),
        ({"on_policy_logprobs": "rollout"}, [1.25, 0.5, 1.5]),
        # 1.25 x 0.5 x 1: what older weights began weighs on what the newest ones continued.
        ({"rollout_correction": {"level": "sequence"}}, [0.625] * 3),
        ({"kind": "gspo"}, [1.25, 0.5, 1.0]),
        ({"rollout_correction": None}, [1.0, 1.0, 1.0]),
        # The ratio is new / rollout itself: 1.25 is clipped, and so is 1.5.
        ({"loss": {"kind": "ppo_clip"}}, [0.0, 0.5, 1.0]),
        ({"loss": {"kind": "ppo_clip"}, "on_policy_logprobs": "rollout"}, [0.0, 0.5, 0.0]),
    ],
)
def test_tokens_of_the_newest_version_are_exactly_on_policy(
    algorithm: dict[str, Any], slopes: list[float]
):
    # proximal / rollout is 1.25, 0.5 and, by the engine's rounding alone, 1.5.
    options: dict[str, Any] = {
        "rollout": [-1.0 - math.log(1.25), -1.0 + LOG_2, -1.0 - math.log(1.5)],
        "on_policy": [False, False, True],
        "advantages": [1.0] * 3,
        **algorithm,
    }
    gradient = gradient_of(tensor([-1.0] * 3), **options)
    assert gradient == pytest.approx([-slope for slope in slopes])
    if slopes[2] == 1.0:
        assert gradient[2] == -1.0, "not to the bit"
    # What the engine is off by is reported all the same.
    gap = loss_of(tensor([-1.0] * 3), **options).sums["logprob_gap"].item()
    assert gap == pytest.approx(math.log(1.25) + LOG_2 + math.log(1.5))


def test_without_a_correction_the_weights_are_those_of_the_default_one():
    options: dict[str, Any] = {"rollout": [-1.0 - 2 * LOG_2, -1.0], "advantages": [1.0, 1.0]}
    for algorithm in ({}, {"loss": {"kind": "ppo_clip"}}, {"rollout_correction": None}):
        output = loss_of(tensor([-1.0, -1.0]), **options, **algorithm)
        assert output.sums["importance_weight"].item() == pytest.approx(2.0 + 1.0)
        assert output.maxima["importance_weight"].item() == pytest.approx(4.0)


def test_a_masked_token_gives_no_gradient_and_stays_in_the_denominator():
    # Raw weights 4 (dropped) and 1; weights of 1/2 each, as if nothing were dropped.
    options: dict[str, Any] = {
        "rollout": [-1.0 - 2 * LOG_2, -1.0],
        "advantages": [1.0, 1.0],
        "weights": [0.5, 0.5],
        "rollout_correction": {"mode": "mask"},
    }
    output = loss_of(tensor([-1.0, -1.0]), **options)
    assert output.loss.item() == pytest.approx(-0.5)
    assert gradient_of(tensor([-1.0, -1.0]), **options) == pytest.approx([0.0, -0.5])
    assert output.sums["importance_weight_clipped"].item() == 1.0
    assert output.sums["importance_weight"].item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("proximal", "rollout", "algorithm", "slope"),
    [
        # Ratios 1.21 and 1 of one sequence: s = 1.1 within the range; alone, 1.21 would be held.
        (math.log(1.21), None, {"kind": "gspo", "loss": {"clip_high": 0.2}}, 1.1),
        # new / rollout = 1.1.
        (0.0, math.log(1.1), {"loss": {"kind": "ppo_clip"}}, 1.1),
    ],
)
def test_the_ratio_of_the_loss_reaches_it(
    proximal: float, rollout: float | None, algorithm: dict[str, Any], slope: float
):
    gradient = gradient_of(
        tensor([-1.0, -1.0]),
        proximal=[-1.0 - proximal, -1.0],
        rollout=None if rollout is None else [-1.0 - rollout] * 2,
        advantages=[1.0, 1.0],
        **algorithm,
    )
    assert gradient == pytest.approx([-slope, -slope])


def test_kl_is_added_per_token_before_aggregation():
    # Token 1: -1 x 1 / 2 + 0.5 x value, with k3 of d = -ln 2: value 1 - ln 2, slope -1; token 2:
    # 0.5 x 0. Weights 1/4 and 3/4. The rollout correction (1/2 here) is the policy loss's alone.
    options: dict[str, Any] = {
        "rollout": [-1.0 + LOG_2, -1.0],
        "advantages": [1.0, 0.0],
        "weights": [0.25, 0.75],
        "ref": [-1.0 + LOG_2, -1.0],
        "kl": {"coef": 0.5, "estimator": "k3"},
    }
    output = loss_of(tensor([-1.0, -1.0]), **options)
    assert output.loss.item() == pytest.approx(0.25 * (-0.5 + 0.5 * (1.0 - LOG_2)))
    assert output.sums["kl"].item() == pytest.approx(1.0 - LOG_2)
    gradient = gradient_of(tensor([-1.0, -1.0]), **options)
    assert gradient == pytest.approx([0.25 * (-0.5 - 0.5), 0.0])


def test_kl_in_the_reward_is_no_part_of_the_loss():
    options: dict[str, Any] = {"advantages": [1.0], "kl": {"coef": 9.0, "place": "reward"}}
    for ref in (None, [-7.0]):
        output = loss_of(tensor([-1.0]), ref=ref, **options)
        assert output.loss.item() == -1.0
        assert output.sums["kl"].item() == 0.0


def test_entropy_lowers_the_loss_per_token():
    # -1 - 0.1 x 2 and -0 - 0.1 x 3, weights 1/4 and 3/4; gradient -0.1 x weight.
    entropies = tensor([2.0, 3.0], requires_grad=True)
    output = loss_of(
        tensor([-1.0, -1.0]),
        advantages=[1.0, 0.0],
        weights=[0.25, 0.75],
        entropies=entropies,
        entropy_coef=0.1,
    )
    output.loss.backward()
    assert output.loss.item() == pytest.approx(0.25 * -1.2 + 0.75 * -0.3)
    assert entropies.grad is not None
    assert entropies.grad.tolist() == pytest.approx([-0.025, -0.075])


def test_missing_inputs_are_named():
    with pytest.raises(ValueError, match=r"^kl is in the loss: compute_loss needs ref_logprobs$"):
        loss_of(tensor([-1.0]), advantages=[1.0], kl={"coef": 0.5})
    with pytest.raises(ValueError, match=r"^entropy_coef is set: compute_loss needs entropies$"):
        loss_of(tensor([-1.0]), advantages=[1.0], entropy_coef=0.5)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "gspo", "cispo", "sapo"])
def test_nothing_trained_is_a_loss_of_zero_with_a_path_for_gradients(kind: str):
    new = tensor([], requires_grad=True)
    output = loss_of(new, advantages=[], kind=kind)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert {value.item() for value in output.maxima.values()} == {0.0}
    assert new.grad is not None


@pytest.mark.parametrize("kind", ["grpo", "rloo", "gspo", "cispo", "sapo"])
def test_parts_add_up_to_the_whole(kind: str):
    new = tensor([-1.0, -2.0, -0.5, -1.5])
    options: dict[str, Any] = {
        "kind": kind,
        "kl": {"coef": 0.1},
        "rollout_correction": {"level": "sequence", "mode": "mask", "cap": 1.1},
    }
    columns: dict[str, list[Any]] = {
        "proximal": [-1.1, -1.9, -0.5, -1.0],
        "rollout": [-1.2, -1.5, -0.7, -1.0],
        "advantages": [1.0, -1.0, 2.0, -2.0],
        "weights": [0.1, 0.2, 0.3, 0.4],
        "ref": [-1.0, -1.0, -1.0, -1.0],
        "sequences": [0, 1, 1, 1],
    }
    whole = loss_of(new, **columns, **options)
    # A sample is never cut: the second part's is its first.
    first = {name: values[:1] for name, values in columns.items()}
    second = {name: values[1:] for name, values in columns.items()} | {"sequences": [0, 0, 0]}
    parts = [loss_of(new[:1], **first, **options), loss_of(new[1:], **second, **options)]
    assert sum(p.loss.item() for p in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    for name, value in whole.sums.items():
        assert sum(p.sums[name].item() for p in parts) == pytest.approx(value.item())
    for name, value in whole.maxima.items():
        assert max(p.maxima[name].item() for p in parts) == pytest.approx(value.item())


@pytest.mark.parametrize(
    "loss", [{"dual_clip": 2.0}, {"kind": "ppo_clip", "dual_clip": 2.0}, {"kind": "sapo"}]
)
def test_gradients_are_those_of_finite_differences(loss: dict[str, Any]):
    generator = torch.Generator().manual_seed(3)
    new, *others = (-3 * torch.rand(24, generator=generator, dtype=torch.float64) for _ in range(5))
    proximal, rollout, ref, advantages = (one.tolist() for one in others)

    def total(logprobs: Tensor) -> Tensor:
        return loss_of(
            logprobs,
            proximal=proximal,
            rollout=rollout,
            ref=ref,
            advantages=[advantage + 1.5 for advantage in advantages],
            sequences=[place // 7 for place in range(24)],
            weights=[1 / 19] * 24,
            loss={"clip_high": 0.28, **loss} if loss.get("kind") != "sapo" else loss,
            kl={"coef": 0.2},
            rollout_correction=None if loss.get("kind") == "ppo_clip" else {"cap": 1.5},
        ).loss

    assert torch.autograd.gradcheck(total, new.requires_grad_(), atol=1e-7)
