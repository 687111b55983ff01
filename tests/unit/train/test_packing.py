"""Packing: every sample once, no budget broken, no padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.train.packing import build_micro_batch, pack_lengths
from agentrl_cli.train.samples import Sample, Targets


@given(st.lists(st.integers(1, 300), max_size=200), st.integers(1, 400))
def test_every_sample_once_and_every_budget_held(lengths: list[int], budget: int):
    bins = pack_lengths(lengths, budget)
    assert sorted(position for one in bins for position in one) == list(range(len(lengths)))
    for one in bins:
        assert len(one) == 1 or sum(lengths[position] for position in one) <= budget


@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(100, 400))
def test_few_bins(lengths: list[int], budget: int):
    """First-fit leaves at most one bin half empty or more: fewer than 2 x total / budget + 1."""
    num_bins = len(pack_lengths(lengths, budget))
    assert math.ceil(sum(lengths) / budget) <= num_bins <= 2 * sum(lengths) / budget + 1


def test_first_fit_decreasing_fills_the_gaps():
    # 7 + 3 and 5 + 4 + 1 fill two bins of 10 exactly; in the order given, first-fit needs three.
    assert pack_lengths([4, 3, 5, 1, 7], 10) == [[4, 1], [2, 0, 3]]


def test_samples_longer_than_the_budget_go_alone():
    assert pack_lengths([5, 30, 5], 10) == [[1], [0, 2]]


def test_no_samples_no_bins_and_no_budget_no_packing():
    assert pack_lengths([], 10) == []
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack_lengths([1], 0)


def sample(ids: list[int], index: int) -> Sample:
    count = len(ids) - 1
    return Sample(
        input_ids=torch.tensor(ids),
        targets=Targets(
            sources=torch.arange(count),
            ids=torch.tensor(ids[1:], dtype=torch.long),
            rollout_logprobs=torch.full((count,), -float(index)),
            versions=torch.zeros(count, dtype=torch.long),
            advantages=torch.full((count,), float(index)),
            temperatures=torch.ones(count),
            top_ps=torch.ones(count),
        ),
        trajectory_index=index,
        trajectory_id=f"g/{index}",
    )


def test_a_micro_batch_lies_end_to_end():
    batch = build_micro_batch(
        [sample([5, 6, 7], 0), sample([4], 1), sample([8, 9], 1)], torch.device("cpu")
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 4, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.lengths == (3, 1, 2)
    assert batch.targets.sources.tolist() == [0, 1, 4]
    assert batch.targets.ids.tolist() == [6, 7, 9]
    assert batch.targets.advantages.tolist() == [0, 0, 1]
    assert batch.spread([0.5, 2.0, 3.0]).tolist() == [0.5, 0.5, 3.0]
    assert batch.sequence_numbers.tolist() == [0, 0, 2]
