"""Policy losses, ratios, corrections and KL estimates against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.config.algorithm_config import (
    CispoLossConfig,
    DecoupledPpoLossConfig,
    GspoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    ReinforceLossConfig,
    RolloutCorrectionConfig,
    SapoLossConfig,
)
from agentrl_cli.train.loss.policy_loss import (
    KlEstimator,
    LossInputs,
    PolicyLoss,
    RolloutCorrection,
    compute_cispo_loss,
    compute_clipped_loss,
    compute_kl,
    compute_policy_loss,
    compute_rollout_correction,
    compute_sequence_log_ratio,
    sum_over_sequences,
)

LOG_2 = math.log(2.0)


def tensor(values: list[float], **options: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, **options)


def evaluate(
    config: LossConfig,
    *,
    ratios: list[float],
    advantages: list[float],
    new: list[float] | None = None,
    rollout: list[float] | None = None,
    sequences: list[int] | None = None,
) -> tuple[PolicyLoss, list[float]]:
    """The losses, and the gradient of their sum; ``ratios`` are new / proximal."""
    logprobs = tensor(new or [-1.0] * len(ratios), requires_grad=True)
    proximal = logprobs.detach() - tensor(ratios).log()
    inputs = LossInputs(
        new_logprobs=logprobs,
        proximal_logprobs=proximal,
        rollout_logprobs=proximal if rollout is None else tensor(rollout),
        is_on_policy=torch.zeros(len(ratios), dtype=torch.bool),
        advantages=tensor(advantages),
        sequence_numbers=torch.tensor(sequences or [0] * len(ratios), dtype=torch.long),
        token_weights=torch.ones(len(ratios)),
    )
    loss = compute_policy_loss(config, inputs)
    loss.losses.sum().backward()
    assert logprobs.grad is not None
    assert not loss.log_ratio.requires_grad
    assert loss.is_clipped.dtype == torch.bool
    return loss, logprobs.grad.tolist()


@pytest.mark.parametrize("kind", ["decoupled", "against what sampled"])
@pytest.mark.parametrize(
    ("dual_clip", "ratio", "advantage", "expected", "slope", "clipped"),
    [
        # Range [0.8, 1.28]. Outside on the side that the advantage pushes to: held, flat.
        (None, 2.0, 1.0, -1.28, 0.0, True),
        (None, 0.5, -1.0, 0.8, 0.0, True),
        # Outside on the other side: the minimum takes the unclipped term, slope -r A.
        (None, 0.5, 1.0, -0.5, -0.5, False),
        (None, 2.0, -1.0, 2.0, 2.0, False),
        # Inside.
        (None, 1.1, 3.0, -3.3, -3.3, False),
        (None, 0.9, -2.0, 1.8, 1.8, False),
        # No advantage, no loss.
        (None, 2.0, 0.0, 0.0, 0.0, False),
        (None, 0.5, 0.0, 0.0, 0.0, False),
        # Dual clip: 5 x 1 bounded by 3, flat.
        (3.0, 5.0, -1.0, 3.0, 0.0, True),
        (3.0, 5.0, -2.0, 6.0, 0.0, True),
        # 2 is below the bound: as without it.
        (3.0, 2.0, -1.0, 2.0, 2.0, False),
        (3.0, 0.5, -1.0, 0.8, 0.0, True),
        # Without an advantage nothing is held, and for positive ones it must not apply.
        (3.0, 5.0, 0.0, 0.0, 0.0, False),
        (3.0, 1.0, 1.0, -1.0, -1.0, False),
        (3.0, 5.0, 1.0, -1.28, 0.0, True),
    ],
)
def test_clipped_losses(
    kind: str,
    dual_clip: float | None,
    ratio: float,
    advantage: float,
    expected: float,
    slope: float,
    clipped: bool,
):
    # The ratio to the other policy is far away, and must not matter.
    if kind == "decoupled":
        config: LossConfig = DecoupledPpoLossConfig(clip_high=0.28, dual_clip=dual_clip)
        others: dict[str, Any] = {"ratios": [ratio], "rollout": [-9.0]}
    else:
        config = PpoClipLossConfig(clip_high=0.28, dual_clip=dual_clip)
        others = {"ratios": [7.0], "rollout": [-1.0 - math.log(ratio)]}
    loss, gradient = evaluate(config, advantages=[advantage], **others)
    assert loss.losses.item() == pytest.approx(expected)
    assert gradient == pytest.approx([slope])
    assert loss.is_clipped.tolist() == [clipped]
    assert loss.log_ratio.item() == pytest.approx(math.log(ratio))


def test_on_the_bound_nothing_is_clipped():
    # Bounds that floating point numbers meet exactly.
    ratios = tensor([-0.5, 0.5, 1.0]).exp()
    low, high, dual = ratios.tolist()
    ppo = DecoupledPpoLossConfig(clip_low=1.0 - low, clip_high=high - 1.0, dual_clip=dual)
    log_ratio, advantages = tensor([-0.5, 0.5, 1.0]), tensor([-1.0, 1.0, -1.0])
    assert compute_clipped_loss(log_ratio, advantages, ppo).is_clipped.tolist() == [False] * 3
    cispo = CispoLossConfig(clip_low=1.0 - low, clip_high=high - 1.0)
    held = compute_cispo_loss(tensor([-1.0] * 3), log_ratio, advantages, cispo).is_clipped
    assert held.tolist() == [False, False, True]


def test_ratios_stay_within_twenty_nats():
    for config in (DecoupledPpoLossConfig(), GspoLossConfig(), PpoClipLossConfig()):
        loss, _ = evaluate(config, ratios=[math.exp(500.0)], advantages=[-1.0], rollout=[-501.0])
        # Unclipped because A < 0: exp(20), large and finite.
        assert loss.losses.item() == pytest.approx(math.exp(20.0))
        loss, _ = evaluate(config, ratios=[math.exp(-500.0)], advantages=[1.0], rollout=[499.0])
        assert loss.losses.item() == pytest.approx(-math.exp(-20.0), abs=0.0)


def test_gspo_has_one_ratio_for_a_sequence():
    # Sequence 0: ratios 1.2 and 0.9 -> sqrt(1.08) = 1.03923; sequence 1: 1.1 alone.
    # Range [0.9, 1.05]. Token losses -s A: -1.03923 x 2 (twice), sequence 1 is held at 1.05.
    # Each token's gradient is -s A of its own: -2.07846, -2.07846; 0 where it is held.
    loss, gradient = evaluate(
        GspoLossConfig(clip_low=0.1, clip_high=0.05),
        ratios=[1.2, 0.9, 1.1],
        advantages=[2.0, 2.0, 3.0],
        sequences=[0, 0, 1],
    )
    ratio = math.sqrt(1.08)
    assert loss.losses.tolist() == pytest.approx([-2 * ratio, -2 * ratio, -3.15])
    assert gradient == pytest.approx([-2 * ratio, -2 * ratio, 0.0])
    assert loss.is_clipped.tolist() == [False, False, True]
    assert loss.log_ratio.exp().tolist() == pytest.approx([ratio, ratio, 1.1])


def test_gspo_with_one_advantage_has_the_gradient_of_the_sequences_own_ratio():
    # The papers' objective: s A with s = exp(mean log ratio), over interleaved sequences.
    numbers = torch.tensor([0, 1, 0, 0, 1])
    new = tensor([-0.5, -1.0, -2.0, -0.1, -0.7], requires_grad=True)
    proximal = tensor([-0.6, -1.3, -1.9, -0.3, -0.5])
    ratio = compute_sequence_log_ratio(new, proximal, numbers).exp()
    (ratio * tensor([2.0, -1.0, 2.0, 2.0, -1.0])).sum().backward()
    token_wise = new.grad
    direct = new.detach().requires_grad_()
    objective = tensor([0.0])
    for number, advantage in ((0, 2.0), (1, -1.0)):
        own = numbers == number
        mean = (direct[own] - proximal[own]).mean()
        # Summed over its tokens, as above.
        objective = objective + own.sum() * mean.exp() * advantage
    objective.backward()
    assert token_wise is not None
    assert direct.grad is not None
    assert token_wise.tolist() == pytest.approx(direct.grad.tolist(), rel=1e-12)


def test_gspo_has_one_ratio_to_the_last_bit():
    # A mean of 2^-12 / 3 beside logprobs of up to -20, which float32 knows to 2^-19.
    new = torch.tensor([-20.0, -0.5, -8.0], requires_grad=True)
    proximal = new.detach() - torch.tensor([2.0**-12, 0.0, 0.0])
    log_ratio = compute_sequence_log_ratio(new, proximal, torch.tensor([0, 0, 0]))
    assert log_ratio.tolist() == [log_ratio[0].item()] * 3
    assert log_ratio[0].item() == pytest.approx(2.0**-12 / 3, rel=1e-6)


def test_gspo_does_not_move_a_turn_by_the_advantage_of_another():
    _, gradient = evaluate(GspoLossConfig(), ratios=[1.0, 1.0], advantages=[1.0, 0.0])
    assert gradient == pytest.approx([-1.0, 0.0])


@pytest.mark.parametrize(
    ("clip_low", "ratio", "weight", "clipped"),
    [
        (None, 7.0, 5.0, True),
        (None, 4.0, 4.0, False),
        (None, 0.001, 0.001, False),
        (0.25, 0.5, 0.75, True),
        (0.25, 0.8, 0.8, False),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_cispo_holds_the_weight_and_keeps_the_gradient(
    clip_low: float | None, ratio: float, weight: float, clipped: bool, advantage: float
):
    # Loss -w A log p with log p = -0.5; gradient -w A, on whichever side it is held.
    loss, gradient = evaluate(
        CispoLossConfig(clip_low=clip_low, clip_high=4.0),
        ratios=[ratio],
        advantages=[advantage],
        new=[-0.5],
    )
    assert loss.losses.item() == pytest.approx(weight * advantage * 0.5)
    assert gradient == pytest.approx([-weight * advantage])
    assert loss.is_clipped.tolist() == [clipped]
    assert loss.log_ratio.item() == pytest.approx(math.log(ratio))


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "slope"),
    [
        # A > 0, t = 2: gate (4 / 2) sigmoid(2 (r - 1)).
        # r = 1: sigmoid(0) = 1/2: gate 1; d gate / d log r = 4 s (1 - s) r = 1.
        (1.0, 3.0, -3.0, -3.0),
        # r = 2: s = sigmoid(2) = 0.880797: gate 1.761594; slope 4 x 0.104994 x 2 = 0.839949.
        (2.0, 1.0, -1.761594, -0.839949),
        # A < 0, t = 4: gate 1 sigmoid(4 (r - 1)). r = 1: 1/2, slope 1.
        (1.0, -2.0, 1.0, 2.0),
        # r = 1/2: s = sigmoid(-2) = 0.119203; slope 4 x 0.104994 x 1/2 = 0.209987.
        (0.5, -1.0, 0.119203, 0.209987),
        (0.5, 0.0, 0.0, 0.0),
    ],
)
def test_sapo(ratio: float, advantage: float, expected: float, slope: float):
    loss, gradient = evaluate(
        SapoLossConfig(positive_temperature=2.0, negative_temperature=4.0),
        ratios=[ratio],
        advantages=[advantage],
    )
    assert loss.losses.item() == pytest.approx(expected, abs=1e-6)
    assert gradient == pytest.approx([slope], abs=1e-6)
    assert loss.is_clipped.tolist() == [False]
    assert loss.log_ratio.item() == pytest.approx(math.log(ratio))


def test_reinforce():
    # -A log p: -2 x -0.5 = 1 and 3 x -2 = -6; gradients -A, whatever the ratio.
    loss, gradient = evaluate(
        ReinforceLossConfig(), ratios=[1.0, 9.0], advantages=[2.0, -3.0], new=[-0.5, -2.0]
    )
    assert loss.losses.tolist() == pytest.approx([1.0, -6.0])
    assert gradient == pytest.approx([-2.0, 3.0])
    assert loss.is_clipped.tolist() == [False, False]
    assert loss.log_ratio.tolist() == pytest.approx([0.0, math.log(9.0)])


@pytest.mark.parametrize(
    "config",
    [
        PpoClipLossConfig(), DecoupledPpoLossConfig(), GspoLossConfig(), CispoLossConfig(),
        SapoLossConfig(), ReinforceLossConfig(),
    ],
)  # fmt: skip
def test_on_policy_every_loss_has_the_same_gradient(config: LossConfig):
    loss, gradient = evaluate(config, ratios=[1.0] * 3, advantages=[2.0, -3.0, 0.5])
    assert gradient == pytest.approx([-2.0, 3.0, -0.5])
    assert not loss.is_clipped.any()


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


def test_sums_over_sequences_that_lie_mixed():
    summed = sum_over_sequences(tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 2]))
    assert summed.tolist() == [5.0, 2.0, 5.0, 8.0]


#: Token by token, and products over sequence 0, 1.5 x 2 = 3, and sequence 1, 0.5 x 0.5 = 0.25.
TOKENS: list[Any] = [[4.0, 2.0, 1.0, 0.5, 0.1], [0] * 5, [4.0, 2.0, 1.0, 0.5, 0.1], "token"]
SEQUENCES: list[Any] = [[1.5, 0.5, 2.0, 0.5], [0, 1, 0, 1], [3.0, 0.25, 3.0, 0.25], "sequence"]


@pytest.mark.parametrize(
    ("case", "config", "weights", "clipped"),
    [
        (TOKENS, {}, [2.0, 2.0, 1.0, 0.5, 0.1], [0]),
        (TOKENS, {"cap": 3.0}, [3.0, 2.0, 1.0, 0.5, 0.1], [0]),
        (TOKENS, {"floor": 0.4}, [2.0, 2.0, 1.0, 0.5, 0.4], [0, 4]),
        # On the bound is inside.
        (TOKENS, {"mode": "mask", "floor": 1.0, "cap": 1.0}, [0, 0, 1.0, 0, 0], [0, 1, 3, 4]),
        (TOKENS, {"mode": "mask", "cap": 2.1}, [0.0, 2.0, 1.0, 0.5, 0.1], [0]),
        (TOKENS, {"mode": "mask", "floor": 0.2, "cap": 5.0}, [4.0, 2.0, 1.0, 0.5, 0.0], [4]),
        (TOKENS, {"mode": "mask", "floor": 0.6, "cap": 1.5}, [0, 0, 1.0, 0, 0], [0, 1, 3, 4]),
        (SEQUENCES, {}, [2.0, 0.25, 2.0, 0.25], [0, 2]),
        (SEQUENCES, {"cap": 4.0, "floor": 0.5}, [3.0, 0.5, 3.0, 0.5], [1, 3]),
        (SEQUENCES, {"mode": "mask"}, [0.0, 0.25, 0.0, 0.25], [0, 2]),
        (SEQUENCES, {"mode": "mask", "cap": 3.1, "floor": 0.3}, [3.0, 0, 3.0, 0], [1, 3]),
    ],
)
def test_correction_weights(
    case: list[Any], config: dict[str, Any], weights: list[float], clipped: list[int]
):
    ratios, sequences, raw, level = case
    correction = correct(ratios, sequences, level=level, **config)
    assert correction.weights.tolist() == pytest.approx(weights)
    assert correction.raw_weights.tolist() == pytest.approx(raw)
    assert correction.is_clipped.nonzero()[:, 0].tolist() == clipped
    assert correction.is_clipped.dtype == torch.bool
    assert not correction.weights.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_finite(level: str):
    correction = correct([math.exp(700.0), math.exp(-700.0)], [0, 1], level=level)
    assert correction.raw_weights.tolist() == pytest.approx([math.exp(20.0), math.exp(-20.0)])


@pytest.mark.parametrize(
    ("estimator", "values", "gradients"),
    [
        # d = new - ref = -ln 2, ln 2, 0.
        ("k1", [-LOG_2, LOG_2, 0.0], [1.0, 1.0, 1.0]),
        ("k2", [LOG_2**2 / 2, LOG_2**2 / 2, 0.0], [-LOG_2, LOG_2, 0.0]),
        # exp(-d) + d - 1 = 2 - ln 2 - 1 and 1/2 + ln 2 - 1; gradient 1 - exp(-d).
        ("k3", [1 - LOG_2, LOG_2 - 0.5, 0.0], [-1.0, 0.5, 0.0]),
    ],
)
def test_kl_by_hand(estimator: KlEstimator, values: list[float], gradients: list[float]):
    new = tensor([-1.0, -1.0, -1.0]).requires_grad_()
    kl = compute_kl(estimator, new, tensor([-1.0 + LOG_2, -1.0 - LOG_2, -1.0]))
    kl.sum().backward()
    assert kl.tolist() == pytest.approx(values)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx(gradients)


def test_k3_is_finite_far_away_and_exact_nearby():
    far = compute_kl("k3", tensor([-600.0]), tensor([0.0]))
    assert far.item() == pytest.approx(math.exp(20.0), rel=1e-6)
    # d = 2^-13: d² / 2 - d³ / 6 = 7.45e-9, less than the last digit of a float32 near 1.
    near = compute_kl("k3", torch.tensor([-1.0]), torch.tensor([-1.0 - 2.0**-13]))
    assert near.item() == pytest.approx(2.0**-27, rel=2e-3)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_what_the_policy_samples_is_the_divergence(estimator: KlEstimator):
    # Policy (0.5, 0.3, 0.2) against (0.2, 0.3, 0.5): 0.5 ln 2.5 + 0 + 0.2 ln 0.4.
    policy, reference = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.3, 0.5])
    mean = (policy * compute_kl(estimator, policy.log(), reference.log())).sum()
    assert mean.item() == pytest.approx(0.5 * math.log(2.5) + 0.2 * math.log(0.4))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_which_estimator_has_the_divergences_gradient(estimator: KlEstimator):
    # As a loss over what the policy samples, k2 has the gradient of the divergence, k1 none.
    logits = tensor([0.4, -0.2, 0.1]).requires_grad_()
    reference = tensor([0.2, 0.3, 0.5]).log()

    def gradient_of(loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, logits)
        return gradient

    logprobs = logits.log_softmax(-1)
    exact = gradient_of((logprobs.exp() * (logprobs - reference)).sum())
    logprobs = logits.log_softmax(-1)
    sampled = (logprobs.exp().detach() * compute_kl(estimator, logprobs, reference)).sum()
    expected = exact if estimator == "k2" else torch.zeros(3, dtype=torch.float64)
    assert gradient_of(sampled).tolist() == pytest.approx(expected.tolist(), abs=1e-12)
