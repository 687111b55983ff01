"""Logits to tokens: the draw, its logprob, and that rows do not touch each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_cli.engine.embedded.token_sampling import (
    list_likeliest,
    mask_logits,
    sample_tokens,
    unpack_masks,
)

# Probabilities 0.5, 0.3, 0.15, 0.05 at temperature 1, in another order.
ROW = [math.log(p) for p in (0.15, 0.5, 0.05, 0.3)]


def _sample(uniform: float, temperature: float = 1.0, top_p: float = 1.0) -> tuple[int, float]:
    tokens, logprobs, _ = sample_tokens(torch.tensor([ROW]), [temperature], [top_p], [uniform])
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize(
    ("uniform", "temperature", "token", "probability"),
    [
        (0.0, 1.0, 0, 0.15),
        (0.149, 1.0, 0, 0.15),
        (0.151, 1.0, 1, 0.5),
        (0.66, 1.0, 2, 0.05),
        (0.9999999, 1.0, 3, 0.3),
        # Squared: 0.0225, 0.25, 0.0025, 0.09; sum 0.365.
        (0.5, 0.5, 1, 0.25 / 0.365),
        # Greedy: certain.
        (0.0, 0.0, 1, 1.0),
        (0.999, 0.0, 1, 1.0),
    ],
)
def test_the_chance_inverts_the_cumulative_distribution(uniform, temperature, token, probability):
    logprob = pytest.approx(math.log(probability), abs=1e-6)
    assert _sample(uniform, temperature) == (token, logprob)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [1]),
        (0.49, [1]),
        (0.51, [1, 3]),  # 0.5 is not enough: the next one comes in whole
        (0.79, [1, 3]),
        (0.81, [0, 1, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p, kept):
    seen = {_sample(i / 500, top_p=top_p) for i in range(500)}
    assert sorted({token for token, _ in seen}) == kept
    mass = sum(math.exp(ROW[token]) for token in kept)
    for token, logprob in seen:
        assert logprob == pytest.approx(ROW[token] - math.log(mass), abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_tokens_without_mass_are_never_drawn(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs, _ = sample_tokens(logits, [1.0], [1.0], [uniform])
    assert int(tokens[0]) == (1 if uniform == 0.0 else 3)
    assert float(logprobs[0]) == pytest.approx(math.log(0.5))


def test_rare_tokens_of_a_large_vocabulary_can_be_drawn():
    logits = torch.zeros(1, 200_000)
    logits[0, 0] = 30.0  # the others have about 1e-13 each, 2e-8 together
    tokens, _, _ = sample_tokens(logits, [1.0], [1.0], [1 - 1e-9])
    assert int(tokens[0]) > 150_000


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)) * 3
    temperatures = [1.0, 0.0, 0.7, 2.0, 1.0, 0.3]
    top_ps = [1.0, 1.0, 0.5, 0.9, 0.2, 1.0]
    uniforms = [0.1, 0.5, 0.9, 0.3, 0.7, 0.99]
    tokens, logprobs, _ = sample_tokens(logits, temperatures, top_ps, uniforms)
    for row in range(6):
        part = slice(row, row + 1)
        token, logprob, _ = sample_tokens(
            logits[part], temperatures[part], top_ps[part], uniforms[part]
        )
        assert int(token[0]) == int(tokens[row])
        assert float(logprob[0]) == pytest.approx(float(logprobs[row]), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_logits_that_are_not_numbers_show_in_the_logprob_of_their_row_alone(temperature, top_p):
    logits = torch.tensor([ROW, [torch.nan] * 4])
    tokens, logprobs, _ = sample_tokens(logits, [temperature] * 2, [top_p] * 2, [0.3, 0.3])
    assert int(tokens[0]) == 1
    assert math.isfinite(float(logprobs[0]))
    assert 0 <= int(tokens[1]) < 4
    assert math.isnan(float(logprobs[1]))


class _FakeMatcher:
    """Allows the tokens it is told to."""

    def __init__(self, allowed: list[int]) -> None:
        self._allowed = allowed

    def fill(self, masks: Any, row: int) -> bool:
        masks[row] = 0
        for token in self._allowed:
            # The highest bit of a word is its sign.
            masks[row, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return bool(self._allowed)


@pytest.mark.parametrize("vocabulary_size", [33, 64, 95, 1000])
def test_masks_are_unpacked_bit_by_bit(vocabulary_size):
    allowed = [0, 31, 32, vocabulary_size - 1]
    masks = np.empty((2, -(-vocabulary_size // 32)), np.int32)
    for row, tokens in enumerate((allowed, [])):
        _FakeMatcher(tokens).fill(masks, row)
    found = unpack_masks(torch.from_numpy(masks), vocabulary_size)
    assert found.shape == (2, vocabulary_size)
    assert found.nonzero().tolist() == [[0, token] for token in sorted(set(allowed))]


def test_a_mask_touches_its_own_row_alone_and_an_empty_one_none():
    logits = torch.tensor([ROW, ROW, ROW])
    masked = mask_logits(logits, [None, _FakeMatcher([0, 3]), _FakeMatcher([])])
    assert torch.equal(masked[0], logits[0])
    assert masked[1].tolist() == [logits[1, 0], -math.inf, -math.inf, logits[1, 3]]
    assert torch.equal(masked[2], logits[2])
    assert torch.equal(logits[1], torch.tensor(ROW))
    drawn = sample_tokens(masked, [1.0] * 3, [1.0] * 3, [0.4] * 3)
    # 0.15 and 0.3 of what is left, 0.45: a third and two thirds.
    assert drawn.tokens.tolist() == [1, 3, 1]
    assert drawn.logprobs[1].item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    likeliest = list_likeliest(drawn.distribution[1], 4)
    assert [token for token, _ in likeliest] == [3, 0]
    assert [math.exp(logprob) for _, logprob in likeliest] == pytest.approx([2 / 3, 1 / 3])
