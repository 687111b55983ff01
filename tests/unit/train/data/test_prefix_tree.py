"""The prefix tree: every sequence is a path, and no token stands twice."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cli.train.data.prefix_tree import (
    PrefixTree,
    Segment,
    build_prefix_tree,
    keep_apart,
    sort_sequences,
)

#: Few different ids and some long common beginnings, so that much is shared.
BRANCHES = st.lists(
    st.builds(
        lambda stem, rest: [1, 2, 3, 4, 5][:stem] + rest,
        st.integers(0, 5),
        st.lists(st.integers(0, 2), max_size=6),
    ).filter(bool),
    min_size=1,
    max_size=12,
)


def build(lists: list[list[int]]) -> PrefixTree:
    sequences = [torch.tensor(ids) for ids in lists]
    return build_prefix_tree(sequences, sort_sequences(sequences))


def find_ancestors(tree: PrefixTree) -> list[set[int]]:
    """The nodes that each node may see, itself included, from the segments alone."""
    seen: list[set[int]] = [set() for _ in range(len(tree.input_ids))]
    for segment in tree.segments:
        for node in range(segment.start, segment.subtree_end):
            seen[node] |= set(range(segment.start, min(node + 1, segment.end)))
    return seen


@given(BRANCHES)
def test_every_path_gives_back_its_sequence_and_its_positions(lists: list[list[int]]):
    tree = build(lists)
    for ids, path in zip(lists, tree.paths, strict=True):
        assert tree.input_ids[path].tolist() == ids
        assert tree.position_ids[path].tolist() == list(range(len(ids)))


@given(BRANCHES)
def test_no_node_stands_twice(lists: list[list[int]]):
    prefixes = {tuple(ids[: n + 1]) for ids in lists for n in range(len(ids))}
    assert len(build(lists).input_ids) == len(prefixes)


@given(BRANCHES)
def test_a_node_sees_its_path_and_nothing_else(lists: list[list[int]]):
    tree = build(lists)
    seen = find_ancestors(tree)
    for path in tree.paths:
        nodes = path.tolist()
        for place, node in enumerate(nodes):
            assert seen[node] == set(nodes[: place + 1])


@given(BRANCHES)
def test_segments_lie_end_to_end_and_subtrees_in_one_piece(lists: list[list[int]]):
    segments = build(lists).segments
    assert segments[0].start == 0
    for one, following in itertools.pairwise(segments):
        assert one.start < one.end == following.start
        # What follows either descends from it or lies behind its subtree.
        assert one.subtree_end == one.end or following.subtree_end <= one.subtree_end
    for one in segments:
        assert one.is_root == (one.position == 0)


@given(BRANCHES)
def test_sequences_kept_apart_share_nothing(lists: list[list[int]]):
    sequences = [torch.tensor(ids) for ids in lists]
    tree = build_prefix_tree(sequences, keep_apart(len(lists)))
    assert tree.input_ids.tolist() == [token for ids in lists for token in ids]
    assert [s.end - s.start for s in tree.segments] == [len(ids) for ids in lists]
    assert all(s.is_root and s.end == s.subtree_end for s in tree.segments)


def test_by_hand():
    tree = build([[5, 6, 7], [5, 6, 8, 9], [5, 6], [4], [5, 6, 7]])
    assert tree.input_ids.tolist() == [4, 5, 6, 7, 8, 9]
    assert tree.position_ids.tolist() == [0, 0, 1, 2, 2, 3]
    assert [path.tolist() for path in tree.paths] == [
        [1, 2, 3], [1, 2, 4, 5], [1, 2], [0], [1, 2, 3],
    ]  # fmt: skip
    assert tree.segments == (
        Segment(start=0, end=1, subtree_end=1, position=0),
        Segment(start=1, end=3, subtree_end=6, position=0),
        Segment(start=3, end=4, subtree_end=4, position=2),
        Segment(start=4, end=6, subtree_end=6, position=2),
    )


def test_a_sequence_that_only_goes_on_stays_one_segment():
    tree = build([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
    assert tree.segments == (Segment(start=0, end=5, subtree_end=5, position=0),)


def test_large_ids_sort_as_numbers_and_equal_sequences_in_their_order():
    lists = [[151_643, 1], [255], [256], [65_536], [256]]
    assert sort_sequences([torch.tensor(ids) for ids in lists]).order == (1, 2, 4, 3, 0)
