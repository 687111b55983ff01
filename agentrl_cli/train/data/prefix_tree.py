"""Token sequences merged where they begin alike: every token that they share is stored once.

A node is one token; its ancestors are the tokens before it. Nodes lie depth first, so that all
descendants of a node follow it without a gap, and a sequence is the path to one node.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes ``start`` to ``end`` - 1: a run in which each node is the parent of the next."""

    start: int
    end: int
    subtree_end: int
    """The nodes from ``end`` to here (exclusive) descend from the run's last node."""
    position: int
    """Of its first node in its sequence: the number of its ancestors."""

    @property
    def is_root(self) -> bool:
        """True: nothing comes before it."""
        return self.position == 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Some sequences as one tree (or several side by side); tensors are on the CPU."""

    input_ids: Tensor
    """int64 [nodes]."""
    position_ids: Tensor
    """int64 [nodes], from 0."""
    paths: tuple[Tensor, ...]
    """The nodes of each sequence, in its order: int64 [tokens]."""
    segments: tuple[Segment, ...]
    """In the order of their nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedSequences:
    """Sequences in dictionary order, and how far each begins like the one before it.

    All that is shared can be read from neighbours: two sequences share the least of what the
    neighbours between them share.
    """

    order: tuple[int, ...]
    """Their numbers."""
    shared: tuple[int, ...]
    """Tokens at the beginning that each shares with the one before it; 0 for the first."""


def sort_sequences(sequences: Sequence[Tensor]) -> SortedSequences:
    """Finds what the sequences (int64 [tokens]) share; equal ones stay in their order."""
    arrays = [sequence.numpy() for sequence in sequences]
    # Big-endian bytes of numbers that are not negative sort like the numbers.
    keys = [array.astype(">u4").tobytes() for array in arrays]
    order = sorted(range(len(arrays)), key=lambda number: (keys[number], number))
    pairs = itertools.pairwise([arrays[number] for number in order])
    shared = [0, *(_count_shared(one, other) for one, other in pairs)][: len(order)]
    return SortedSequences(tuple(order), tuple(shared))


def keep_apart(count: int) -> SortedSequences:
    """The same for ``count`` sequences of which nothing is to be shared."""
    return SortedSequences(tuple(range(count)), (0,) * count)


def build_prefix_tree(sequences: Sequence[Tensor], found: SortedSequences) -> PrefixTree:
    """The tree of sequences (int64 [tokens], at least one token each)."""
    runs: list[tuple[int, int, int]] = []
    paths: dict[int, Tensor] = {}
    boundaries = {0}
    path, num_nodes = torch.zeros(0, dtype=torch.long), 0
    for number, shared in zip(found.order, found.shared, strict=True):
        length = sequences[number].numel()
        # A sequence that begins where the last one ended continues its run.
        if shared == 0 or int(path[shared - 1]) != num_nodes - 1:
            boundaries |= {num_nodes, int(path[shared - 1]) + 1 if shared else num_nodes}
        new = torch.arange(num_nodes, num_nodes + length - shared)
        path = paths[number] = torch.cat([path[:shared], new])
        runs.append((number, shared, length))
        num_nodes += length - shared
    position_ids = torch.cat([torch.arange(shared, length) for _, shared, length in runs])
    return PrefixTree(
        input_ids=torch.cat([sequences[number][shared:] for number, shared, _ in runs]),
        position_ids=position_ids,
        paths=tuple(paths[number] for number in range(len(sequences))),
        segments=_build_segments(sorted({*boundaries, num_nodes}), position_ids),
    )


def _build_segments(boundaries: Sequence[int], position_ids: Tensor) -> tuple[Segment, ...]:
    """The segments between boundaries. A subtree ends where a segment begins no deeper."""
    starts = boundaries[:-1]
    positions = position_ids[torch.tensor(starts)].tolist()
    subtree_ends = [boundaries[-1]] * len(starts)
    waiting: list[int] = []
    for number, position in enumerate(positions):
        while waiting and positions[waiting[-1]] >= position:
            subtree_ends[waiting.pop()] = starts[number]
        waiting.append(number)
    ends = boundaries[1:]
    return tuple(map(Segment, starts, ends, subtree_ends, positions))


def _count_shared(
    one: np.ndarray[tuple[int], np.dtype[np.int64]],
    other: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length
