"""Shares of ranks: everything once, neighbours together, and as even as neighbours can be."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.train.model.trained_model import divide_evenly

costs_of_samples = st.lists(st.integers(0, 50), max_size=12)


@given(costs=costs_of_samples, count=st.integers(1, 6))
def test_every_sample_is_in_one_share_beside_its_neighbours(costs: list[int], count: int) -> None:
    shares = divide_evenly(costs, count)
    assert len(shares) == count
    assert [position for share in shares for position in share] == list(range(len(costs)))


@given(costs=st.lists(st.integers(0, 50), min_size=1, max_size=9), count=st.integers(1, 4))
def test_no_other_cut_has_a_cheaper_costliest_share(costs: list[int], count: int) -> None:
    largest = max(sum(costs[i] for i in share) for share in divide_evenly(costs, count))
    places = range(len(costs) + 1)
    best = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations_with_replacement(places, count - 1)
    )
    assert largest == best
    assert largest <= sum(costs) / count + max(costs)


def test_by_hand() -> None:
    assert divide_evenly([4, 1, 1, 1, 1], 2) == [range(0, 1), range(1, 5)]
    assert divide_evenly([1, 1, 1, 1, 4], 3) == [range(0, 4), range(4, 5), range(5, 5)]
    assert divide_evenly([], 2) == [range(0, 0), range(0, 0)]
    assert divide_evenly([0, 0, 7], 1) == [range(0, 3)]
