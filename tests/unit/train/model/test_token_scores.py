"""The nucleus by hand, among equals, and where it is larger than what is sorted first."""

from __future__ import annotations

import pytest
import torch

from agentrl_cli.train.model import token_scores
from agentrl_cli.train.model.token_scores import find_outside_nucleus


@pytest.mark.parametrize(
    ("probabilities", "top_p", "target", "kept"),
    [
        # 0.4 is not 0.6 yet, 0.4 + 0.3 is.
        ([0.1, 0.4, 0.2, 0.3], 0.6, 1, [1, 3]),
        ([0.1, 0.4, 0.2, 0.3], 0.3, 1, [1]),
        ([0.1, 0.4, 0.2, 0.3], 1.0, 0, [0, 1, 2, 3]),
        # The target is always in it.
        ([0.1, 0.4, 0.2, 0.3], 0.3, 0, [0, 1]),
        # Of equal tokens the first go before: as many of the three of 0.2 as reach top_p.
        ([0.2, 0.4, 0.2, 0.2], 0.7, 1, [0, 1, 2]),
        ([0.2, 0.4, 0.2, 0.2], 0.5, 1, [0, 1]),
    ],
)
def test_by_hand(probabilities: list[float], top_p: float, target: int, kept: list[int]):
    removed = find_outside_nucleus(
        torch.tensor([probabilities]), torch.tensor([top_p]), torch.tensor([target])
    )
    assert (~removed[0]).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("num_likeliest", [1, 4, 40])
def test_it_does_not_hang_on_how_many_are_sorted_first(monkeypatch, num_likeliest: int):
    torch.manual_seed(0)
    # Rounded, so that many are equal.
    weights = (torch.rand(50, 40) * 6).round() + 0.01
    probabilities = weights / weights.sum(-1, keepdim=True)
    top_ps = torch.linspace(0.05, 1.0, 50)
    targets = torch.randint(0, 40, (50,))
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    expected = (before >= top_ps[:, None]) & (top_ps < 1)[:, None]
    expected = expected.scatter(1, order, expected).scatter(1, targets[:, None], False)
    monkeypatch.setattr(token_scores, "_NUM_LIKELIEST", num_likeliest)
    found = find_outside_nucleus(probabilities, top_ps, targets)
    assert torch.equal(found, expected)
    assert not found[-1].any()
