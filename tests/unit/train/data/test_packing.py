"""Packing: every sample once, no budget exceeded, no padding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.train.data.packing import (
    Packing,
    build_micro_batch,
    pack_lengths,
    pack_samples,
    plan_micro_batches,
)
from agentrl_cli.train.data.prefix_tree import Segment
from agentrl_cli.train.data.samples import Sample, Targets


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


def test_no_samples_no_bins():
    assert pack_lengths([], 10) == []
    assert plan_micro_batches([], 10) == []


#: A stem that is shared, how much of it, and what follows.
SEQUENCES = st.lists(
    st.builds(
        lambda stem, cut, rest: ([stem] * 20)[:cut] + rest,
        st.integers(7, 8),
        st.integers(0, 20),
        st.lists(st.integers(0, 1), min_size=1, max_size=30),
    ),
    min_size=1,
    max_size=30,
)


def count_different(lists: list[list[int]]) -> int:
    return len({tuple(ids[: n + 1]) for ids in lists for n in range(len(ids))})


@given(SEQUENCES, st.integers(1, 150), st.sampled_from(["prefix_tree", "plain"]))
def test_a_plan_holds_every_sample_once_and_keeps_its_budget(
    lists: list[list[int]], budget: int, packing: Packing
):
    plan = plan_micro_batches([torch.tensor(ids) for ids in lists], budget, packing)
    assert sorted(number for one in plan for number in one) == list(range(len(lists)))
    for one in plan:
        own = [lists[number] for number in one]
        num_tokens = count_different(own) if packing == "prefix_tree" else sum(map(len, own))
        # Above the budget only where a sample alone is.
        assert num_tokens <= budget or num_tokens == max(map(len, own))


@pytest.mark.slow
@given(SEQUENCES, st.integers(60, 150))
def test_samples_that_share_more_than_they_differ_stay_together(
    lists: list[list[int]], budget: int
):
    """A family (what follows one stem of 40) that fits the budget lies in one micro-batch."""
    families = {9: lists, 10: lists[::2], 11: lists[:1]}
    sequences = [[stem] * 40 + ids for stem, rows in families.items() for ids in rows]
    plan = plan_micro_batches([torch.tensor(ids) for ids in sequences], budget)
    homes = {number: home for home, one in enumerate(plan) for number in one}
    for stem in families:
        members = [n for n, ids in enumerate(sequences) if ids[0] == stem]
        if count_different([sequences[n] for n in members]) <= budget:
            assert len({homes[n] for n in members}) == 1


def test_groups_stay_whole_and_their_prompt_counts_once():
    """Two groups of three with prompts of 50: 80 different tokens each, 210 all told."""
    groups = [[group] * 50 + [10 + index] * 10 for group in (1, 2) for index in range(3)]
    sequences = [torch.tensor(ids) for ids in groups]
    assert plan_micro_batches(sequences, 100) == [[0, 1, 2], [3, 4, 5]]
    assert plan_micro_batches(sequences, 160) == [[0, 1, 2, 3, 4, 5]]
    assert [len(one) for one in plan_micro_batches(sequences, 160, "plain")] == [2, 2, 2]


def test_a_group_above_the_budget_is_divided_with_its_prompt_in_each_part():
    sequences = [torch.tensor([1] * 50 + [10 + index] * 10) for index in range(5)]
    plan = plan_micro_batches(sequences, 70)
    assert sorted(len(one) for one in plan) == [1, 2, 2]


def test_micro_batches_are_filled_evenly():
    # First-fit would leave 10 + 10 and 2.
    lengths = [5, 5, 5, 5, 2]
    plan = plan_micro_batches(
        [torch.arange(100 * n, 100 * n + k) for n, k in enumerate(lengths)], 15
    )
    assert sorted(sum(lengths[n] for n in one) for one in plan) == [10, 12]


def test_a_long_sample_costs_more_than_short_ones_of_as_many_tokens():
    """Attention grows with the square: two short ones more lie beside the short ones."""
    lengths = [40_000, *[10_000] * 6]
    plan = plan_micro_batches([torch.full((k,), n) for n, k in enumerate(lengths)], 60_000)
    assert plan == [[0], [1, 2, 3, 4, 5, 6]]


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
        [sample([5, 6, 7], 0), sample([4], 1), sample([8, 9], 1)], torch.device("cpu"), "plain"
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 4, 8, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.num_tokens == 6
    assert batch.targets.sources.tolist() == [0, 1, 4]
    assert batch.targets.ids.tolist() == [6, 7, 9]
    assert batch.targets.advantages.tolist() == [0, 0, 1]
    assert batch.spread([0.5, 2.0, 3.0]).tolist() == [0.5, 0.5, 3.0]


def test_shared_tokens_stand_once_and_keep_their_own_targets():
    batch = build_micro_batch(
        [sample([5, 6, 7], 1), sample([5, 6, 8], 2), sample([5, 6, 7], 3)], torch.device("cpu")
    )
    assert batch.input_ids.tolist() == [5, 6, 7, 8]
    assert batch.targets.sources.tolist() == [0, 1, 0, 1, 0, 1]
    assert batch.targets.ids.tolist() == [6, 7, 6, 8, 6, 7]
    assert batch.targets.advantages.tolist() == [1, 1, 2, 2, 3, 3]


@given(SEQUENCES, st.integers(1, 150))
def test_every_target_is_predicted_from_its_own_prefix(lists: list[list[int]], budget: int):
    samples = [sample(ids, index) for index, ids in enumerate(lists)]
    for batch in pack_samples(samples, budget, torch.device("cpu")):
        prefixes = []
        for one in batch.samples:
            ids = one.input_ids.tolist()
            prefixes += [ids[: n + 1] for n in range(len(ids) - 1)]
        seen = find_ancestors(batch.segments)
        for source, prefix in zip(batch.targets.sources.tolist(), prefixes, strict=True):
            assert batch.input_ids[seen[source]].tolist() == prefix


def find_ancestors(segments: Sequence[Segment]) -> list[list[int]]:
    """The nodes that each node sees, itself last."""
    seen: list[list[int]] = [[] for _ in range(segments[-1].end)]
    for segment in segments:
        for node in range(segment.start, segment.subtree_end):
            seen[node] += range(segment.start, min(node + 1, segment.end))
    return seen
