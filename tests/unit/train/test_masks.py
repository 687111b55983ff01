"""Masks of constrained tokens: kept once, and put on the logits that they belong to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agentrl_cli.train.masks import FREE, MaskMaker, MaskTable, TokenMasks, join_masks
from agentrl_cli.train.model.output_head import compute_logprobs

VOCABULARY_SIZE = 70
NUM_WORDS = 3


def pack(*tokens: int) -> Any:
    mask = np.zeros(NUM_WORDS * 32, np.uint8)
    mask[list(tokens)] = 1
    return np.packbits(mask, bitorder="little").view(np.int32)


def test_equal_masks_have_one_number_and_the_first_allows_all() -> None:
    table = MaskTable(NUM_WORDS)
    assert table.add(np.full(NUM_WORDS, -1, np.int32)) == FREE
    first, second = table.add(pack(3, 31, 69)), table.add(pack(32))
    assert table.add(pack(3, 31, 69)) == first != second
    assert len(table) == 3
    numbers = torch.tensor([second, FREE, first])
    allowed = table.unpack(numbers, VOCABULARY_SIZE)
    assert allowed.shape == (3, VOCABULARY_SIZE)
    assert allowed[0].nonzero().flatten().tolist() == [32]
    assert allowed[1].all()
    assert allowed[2].nonzero().flatten().tolist() == [3, 31, 69]
    # A mask that comes later is there too.
    third = table.add(pack(1))
    assert table.unpack(torch.tensor([third]), VOCABULARY_SIZE).nonzero().tolist() == [[0, 1]]


def test_sequences_without_masks_are_free_in_between() -> None:
    table = MaskTable(NUM_WORDS)
    number = table.add(pack(5))
    part = TokenMasks(torch.tensor([FREE, number]), table)
    joined = join_masks([None, part, None], [2, 2, 1])
    assert joined is not None
    assert joined.numbers.tolist() == [FREE, FREE, FREE, number, FREE]
    assert join_masks([None, None], [2, 2]) is None


@pytest.fixture
def case() -> tuple[Tensor, nn.Linear, Tensor, TokenMasks, list[set[int] | None]]:
    """Ten tokens, of which every second is constrained to some that hold its target."""
    torch.manual_seed(0)
    hidden = torch.randn(10, 8, requires_grad=True)
    targets = torch.randint(0, VOCABULARY_SIZE, (10,))
    table = MaskTable(NUM_WORDS)
    numbers, allowed = [], []
    for place, target in enumerate(targets.tolist()):
        if place % 2:
            numbers.append(FREE)
            allowed.append(None)
            continue
        tokens = {target, (target + 7) % VOCABULARY_SIZE, place % 4}
        numbers.append(table.add(pack(*tokens)))
        allowed.append(tokens)
    masks = TokenMasks(torch.tensor(numbers), table)
    return hidden, nn.Linear(8, VOCABULARY_SIZE, bias=False), targets, masks, allowed


@pytest.mark.parametrize("max_logits", [2 * VOCABULARY_SIZE, 2**20])
def test_no_gradient_reaches_a_token_that_was_not_allowed(case, max_logits) -> None:
    hidden, head, targets, masks, allowed = case
    ones = torch.ones(10)
    found = compute_logprobs(hidden, head, targets, ones, ones, masks=masks, max_logits=max_logits)
    found.logprobs[::2].sum().backward()
    assert head.weight.grad is not None
    touched = {int(row) for row in head.weight.grad.abs().sum(1).nonzero()}
    assert touched == set().union(*(tokens for tokens in allowed if tokens is not None))
    assert torch.isfinite(hidden.grad).all()
    assert not hidden.grad[1::2].any()


class _OneWordGrammars:
    """Grammars of one text: the tag's own token ids, separated by spaces."""

    num_words = NUM_WORDS

    def start(self, tag: str) -> Any:
        expected = [int(token) for token in tag.split()]

        class Matcher:
            def fill(self, masks: Any, row: int) -> bool:
                masks[row] = pack(expected[0])
                return True

            def accept(self, token: int) -> bool:
                return expected.pop(0) == token

        return Matcher()


def test_masks_are_made_of_the_ids_on_record() -> None:
    maker = MaskMaker(_OneWordGrammars())  # type: ignore[arg-type]
    numbers = maker.number_masks("4 5 4", [4, 5, 4])
    assert numbers is not None
    assert numbers[0] == numbers[2] != numbers[1]
    assert maker.number_masks("4 5", [4]) == [numbers[0]]
    assert maker.number_masks("4 5", [4, 6]) is None
