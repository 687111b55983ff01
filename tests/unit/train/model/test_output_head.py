"""Head and scores as one operation: equal to the plain formula with gradients, in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl_cli.train.masks import FREE, MaskTable, TokenMasks
from agentrl_cli.train.model.output_head import is_linear, score_targets
from agentrl_cli.train.model.token_scores import Choices, build_choices

NUM_TARGETS, WIDTH, VOCABULARY_SIZE = 11, 8, 70
WHOLE = NUM_TARGETS * VOCABULARY_SIZE


def build_head(*, bias: bool = False, vocabulary_size: int = VOCABULARY_SIZE) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, vocabulary_size, bias=bias)


def build_states(num_targets: int = NUM_TARGETS) -> Tensor:
    torch.manual_seed(4)
    return (3 * torch.randn(num_targets, WIDTH)).requires_grad_()


def build_masks(ids: Tensor, vocabulary_size: int) -> TokenMasks:
    """Every second target was one of itself and three others."""
    num_words = -(-vocabulary_size // 32)
    table, numbers = MaskTable(num_words), []
    for place, target in enumerate(ids.tolist()):
        bits = np.zeros(num_words * 32, np.uint8)
        bits[[target, (target + 9) % vocabulary_size, place, place + 30]] = 1
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        numbers.append(FREE if place % 2 else table.add(packed))
    return TokenMasks(torch.tensor(numbers), table)


def choose(
    sampling: str, num_targets: int = NUM_TARGETS, vocabulary_size: int = VOCABULARY_SIZE
) -> Choices:
    torch.manual_seed(5)
    ids = torch.randint(0, vocabulary_size, (num_targets,))
    ones = torch.ones(num_targets)
    # Some targets are as they would be without.
    temperatures = torch.tensor([0.7, 1.0, 1.6] * num_targets)[:num_targets]
    top_ps = torch.tensor([0.9, 0.5, 1.0, 0.2] * num_targets)[:num_targets]
    return build_choices(
        ids,
        temperatures if "temperature" in sampling else ones,
        top_ps if "top_p" in sampling else ones,
        build_masks(ids, vocabulary_size) if "mask" in sampling else None,
    )


SAMPLINGS = ["plain", "temperature", "top_p", "mask", "temperature top_p mask"]


def compute_plainly(head: nn.Linear, states: Tensor, choices: Choices) -> tuple[Tensor, Tensor]:
    """The textbook's way, row by row, in the number type of the states."""
    logprobs, entropies = [], []
    for row, target in enumerate(choices.ids.tolist()):
        logits = nn.functional.linear(states[row], head.weight, head.bias)
        possible = torch.ones(len(logits), dtype=torch.bool)
        if choices.masks is not None:
            possible &= choices.masks.table.unpack(choices.masks.numbers, len(logits))[row]
        if choices.temperatures is not None:
            logits = logits / choices.temperatures[row].to(logits.dtype)
        logits = logits.masked_fill(~possible, -torch.inf)
        if choices.top_ps is not None and choices.top_ps[row] < 1:
            probabilities = logits.detach().softmax(-1).tolist()
            mass, kept = 0.0, {target}
            for token in sorted(range(len(logits)), key=lambda t: -probabilities[t]):
                if mass < choices.top_ps[row]:
                    kept.add(token)
                mass += probabilities[token]
            outside = [token not in kept for token in range(len(logits))]
            possible &= ~torch.tensor(outside)
            logits = logits.masked_fill(~possible, -torch.inf)
        distribution = logits.log_softmax(-1)
        logprobs.append(distribution[target])
        distribution = distribution[possible]
        entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def differentiate(
    scores: tuple[Tensor, Tensor], states: Tensor, head: nn.Linear, *, entropy: bool
) -> list[Tensor]:
    """Gradients of a loss that weighs every target differently."""
    weights = torch.linspace(-1, 1, len(scores[0]))
    loss = (weights * scores[0]).sum()
    if entropy:
        loss = loss + (weights.flip(0) * scores[1]).sum()
    leaves = [leaf for leaf in (states, *head.parameters()) if leaf.requires_grad]
    return list(torch.autograd.grad(loss, leaves))


def assert_same(
    found: tuple[Tensor, Tensor],
    expected: tuple[Tensor, Tensor],
    states: Tensor,
    head: nn.Linear,
    *,
    entropy: bool = True,
    tolerance: float = 1e-6,
) -> None:
    """Equal scores, and equal gradients of the states and of what is trained of the head."""
    pairs = [
        *zip(found, expected, strict=True),
        *zip(
            differentiate(found, states, head, entropy=entropy),
            differentiate(expected, states, head, entropy=entropy),
            strict=True,
        ),
    ]
    for left, right in pairs:
        torch.testing.assert_close(left, right, atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bias", "frozen", "more than a matrix"])
@pytest.mark.parametrize("max_logits", [1, 3 * VOCABULARY_SIZE, WHOLE])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_values_and_gradients_are_those_of_the_plain_formula(
    sampling: str, max_logits: int, kind: str, entropy: bool
) -> None:
    head, states, choices = build_head(bias=kind == "bias"), build_states(), choose(sampling)
    head.requires_grad_(kind != "frozen")
    called = nn.Sequential(nn.Identity(), head) if kind == "more than a matrix" else head
    assert is_linear(called) == (called is head)
    found = score_targets(called, states, choices, max_logits)
    expected = compute_plainly(head, states, choices)
    assert_same(found, expected, states, head, entropy=entropy, tolerance=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("max_logits", [30_000, 60 * 3000])
@pytest.mark.parametrize("sampling", ["plain", "temperature top_p mask"])
def test_borders_of_tiles_and_blocks_change_nothing(
    sampling: str, max_logits: int, is_trained: bool
) -> None:
    """Tiles of 448 of 3,000 columns or 10 of 60 rows, worked on by blocks of 43 rows."""
    head = build_head(vocabulary_size=3000).requires_grad_(is_trained)
    states, choices = build_states(60), choose(sampling, 60, 3000)
    found = score_targets(head, states, choices, max_logits)
    expected = compute_plainly(head, states, choices)
    assert_same(found, expected, states, head, tolerance=1e-5)


@pytest.mark.parametrize("max_logits", [5 * VOCABULARY_SIZE, WHOLE])
def test_bfloat16_is_as_near_to_the_truth_as_the_plain_formula(max_logits: int) -> None:
    """Products of bfloat16 are rounded; scores and sums over tiles are not."""
    head, states, choices = build_head().bfloat16(), build_states().bfloat16(), choose("plain")
    states = states.detach().requires_grad_()
    exact_head, exact_states = build_head().double(), states.detach().double().requires_grad_()
    with torch.no_grad():
        exact_head.weight.copy_(head.weight)
    truth = differentiate(
        compute_plainly(exact_head, exact_states, choices), exact_states, exact_head, entropy=False
    )
    errors = []
    for score in (
        lambda: score_targets(head, states, choices, max_logits),
        lambda: compute_in_one_piece(head, states, choices.ids),
    ):
        gradients = differentiate(score(), states, head, entropy=False)
        assert all(g.dtype == torch.bfloat16 for g in gradients)
        errors.append(
            [
                float((g.double() - t).norm() / t.norm())
                for g, t in zip(gradients, truth, strict=True)
            ]
        )
    assert all(own < 1.2 * plain for own, plain in zip(*errors, strict=True)), errors


def compute_in_one_piece(head: nn.Linear, states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    distribution = head(states).float().log_softmax(-1)
    return distribution.gather(1, ids[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


def test_the_gradient_of_a_near_certain_token_keeps_its_digits() -> None:
    """Of p = 1 - 3e-7, float32 holds 1 - p to 20 % only; its logarithm holds it to all digits."""
    head = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[15.0], [0.0]]))
    states = torch.ones(1, 1, requires_grad=True)
    choices = Choices(torch.tensor([0]), None, None, None)
    logprobs, _ = score_targets(head, states, choices, 100)
    (gradient,) = torch.autograd.grad(logprobs.sum(), head.weight)
    expected = 1 / (1 + np.exp(15.0))
    assert gradient[1, 0].item() == pytest.approx(-expected, rel=1e-4)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_no_float_tensor_is_larger_than_a_tile_forward_or_backward(
    watch_largest: Callable[[], Any], top_p: float, is_trained: bool, entropy: bool
) -> None:
    num_targets, vocabulary_size, max_logits = 60, 3000, 30_000
    head = build_head(vocabulary_size=vocabulary_size).requires_grad_(is_trained)
    states, ids = build_states(num_targets), torch.arange(num_targets)
    ones = torch.ones(num_targets)
    choices = build_choices(ids, 0.9 * ones, top_p * ones, None)
    with watch_largest() as largest:
        scores = score_targets(head, states, choices, max_logits)
        forward = largest.num_values
        differentiate(scores, states, head, entropy=entropy)
    # The head itself has 24,000 values, all logits would be 180,000.
    assert forward <= max_logits
    assert largest.num_values <= max_logits
    with watch_largest() as whole:
        differentiate(compute_in_one_piece(head, states, ids), states, head, entropy=entropy)
    assert whole.num_values == num_targets * vocabulary_size


def test_a_second_backward_pass_is_refused_not_wrong() -> None:
    """The kept probabilities become the gradient in place."""
    head, states = build_head(), build_states()
    loss = score_targets(head, states, choose("plain"), WHOLE)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
