"""Packs samples into micro-batches under a token budget, without padding.

With ``train.packing: prefix_tree`` a prefix that several samples of a micro-batch share is in it
once, and counts against the budget once. So samples that share much are put together, from what
the whole batch shares (a system prompt) down to what branches share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl_cli.train.data.prefix_tree import (
    Segment,
    SortedSequences,
    build_prefix_tree,
    keep_apart,
    sort_sequences,
)
from agentrl_cli.train.data.samples import Sample, Targets, join_targets

Packing = Literal["prefix_tree", "plain"]

#: Pairs of query and key whose attention costs what the rest of a layer costs for one token:
#: 6 x width, here for a width of 1024. Only how evenly micro-batches are filled depends on it.
PAIRS_PER_TOKEN = 6144


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The tokens of some samples, on one device."""

    samples: tuple[Sample, ...]
    input_ids: Tensor
    """int64 [tokens]; a prefix that samples share is there once."""
    position_ids: Tensor
    """int64 [tokens]: the position of each in its samples, from 0."""
    segments: tuple[Segment, ...]
    """Which tokens each of them comes after."""
    targets: Targets
    """Of all samples, in order; their sources are positions in ``input_ids``."""

    @property
    def num_tokens(self) -> int:
        """Tokens that pass through the model."""
        return int(self.input_ids.numel())

    @property
    def sequence_numbers(self) -> Tensor:
        """The index in ``samples`` of each target's sample: int64 [targets]."""
        repeats = torch.tensor([sample.num_targets for sample in self.samples])
        return torch.arange(len(repeats)).repeat_interleave(repeats).to(self.input_ids.device)

    def join(self, by_sample: Mapping[int, Tensor]) -> Tensor:
        """Values [targets] by ``id(sample)``, end to end for all targets, on their device."""
        parts = [by_sample[id(sample)] for sample in self.samples]
        return torch.cat(parts).to(self.input_ids.device)

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """Values [targets] of all targets by ``id(sample)``, float32 on the CPU."""
        parts = torch.split(values.detach().float().cpu(), [s.num_targets for s in self.samples])
        return {id(s): part for s, part in zip(self.samples, parts, strict=True)}

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value per sample, repeated over its targets: float32 [targets]."""
        of_samples = torch.tensor(values, dtype=torch.float32, device=self.input_ids.device)
        return of_samples[self.sequence_numbers]


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Samples that belong in one micro-batch."""

    numbers: tuple[int, ...]
    num_tokens: int
    """Distinct tokens of all of them."""
    num_pairs: int
    """Pairs of a token and one that it attends to."""

    @property
    def cost(self) -> float:
        """Computing time, in tokens."""
        return self.num_tokens + self.num_pairs / PAIRS_PER_TOKEN


def build_micro_batch(
    samples: Sequence[Sample], device: torch.device, packing: Packing = "prefix_tree"
) -> MicroBatch:
    """The samples' tensors in one, on ``device``."""
    sequences = [sample.input_ids for sample in samples]
    found = sort_sequences(sequences) if packing == "prefix_tree" else keep_apart(len(samples))
    tree = build_prefix_tree(sequences, found)
    sources = [path[s.targets.sources] for s, path in zip(samples, tree.paths, strict=True)]
    return MicroBatch(
        samples=tuple(samples),
        input_ids=tree.input_ids.to(device),
        position_ids=tree.position_ids.to(device),
        segments=tree.segments,
        targets=join_targets([s.targets for s in samples]).move(torch.cat(sources), device),
    )


def pack_samples(
    samples: Sequence[Sample],
    max_tokens: int,
    device: torch.device,
    packing: Packing = "prefix_tree",
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` distinct tokens that hold every sample once.

    A sample is never cut: one that is longer gets a micro-batch of its own.
    """
    return [
        build_micro_batch([samples[i] for i in numbers], device, packing)
        for numbers in plan_micro_batches([s.input_ids for s in samples], max_tokens, packing)
    ]


def plan_micro_batches(
    sequences: Sequence[Tensor], max_tokens: int, packing: Packing = "prefix_tree"
) -> list[list[int]]:
    """The indices of the sequences (int64 [tokens]) of each micro-batch.

    As few micro-batches as first-fit decreasing finds, balanced in computing time, so that none
    needs more memory than it must.
    """
    if not sequences:
        return []
    found = sort_sequences(sequences) if packing == "prefix_tree" else keep_apart(len(sequences))
    bundles = _bundle(sequences, found, max_tokens)
    bins = pack_lengths([bundle.num_tokens for bundle in bundles], max_tokens)
    bins = _even_out(bundles, len(bins), max_tokens) or bins
    return [sorted(i for number in one for i in bundles[number].numbers) for one in bins]


def pack_lengths(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of ``lengths`` in bins whose sums are at most ``max_tokens``.

    First-fit decreasing: at most 11/9 of the best possible number of bins. A longer item gets a
    bin of its own. Every position comes exactly once; the result depends on the arguments only.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for position in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        length = lengths[position]
        for index, free in enumerate(room):
            if length <= free:
                bins[index].append(position)
                room[index] -= length
                break
        else:
            bins.append([position])
            room.append(max_tokens - length)
    return bins


def _bundle(sequences: Sequence[Tensor], found: SortedSequences, max_tokens: int) -> list[_Bundle]:
    """Groups what shares a prefix, from the deepest branches up.

    ``open_bundles`` holds, by the number of tokens that they share, the bundles of the sequences
    so far to which more may come.
    """
    open_bundles: list[tuple[int, list[_Bundle]]] = [(0, [])]
    for number, next_shared in zip(found.order, [*found.shared[1:], 0], strict=True):
        length = sequences[number].numel()
        bundles = [_Bundle((number,), length, _count_pairs(length))]
        while open_bundles[-1][0] > next_shared:
            shared, others = open_bundles.pop()
            bundles = _fill([*others, *bundles], shared, max_tokens)
        if open_bundles[-1][0] < next_shared:
            open_bundles.append((next_shared, bundles))
        else:
            open_bundles[-1][1].extend(bundles)
    return open_bundles[0][1]


def _fill(bundles: Sequence[_Bundle], shared: int, max_tokens: int) -> list[_Bundle]:
    """Bundles that share ``shared`` tokens, joined as far as the budget allows."""
    lengths = [bundle.num_tokens - shared for bundle in bundles]
    joined = []
    for one in pack_lengths(lengths, max(max_tokens - shared, 0)):
        members = [bundles[position] for position in sorted(one)]
        again = len(members) - 1
        joined.append(
            _Bundle(
                tuple(number for bundle in members for number in bundle.numbers),
                sum(bundle.num_tokens for bundle in members) - again * shared,
                sum(bundle.num_pairs for bundle in members) - again * _count_pairs(shared),
            )
        )
    return joined


def _even_out(bundles: Sequence[_Bundle], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """As many bins, the costliest bundle always into the cheapest; None: over the budget."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    costs, tokens = [0.0] * num_bins, [0] * num_bins
    for number in sorted(range(len(bundles)), key=lambda n: (-bundles[n].cost, n)):
        bundle = bundles[number]
        fitting = [
            one
            for one in range(num_bins)
            if not bins[one] or tokens[one] + bundle.num_tokens <= max_tokens
        ]
        if not fitting:
            return None
        chosen = min(fitting, key=lambda one: costs[one])
        bins[chosen].append(number)
        costs[chosen] += bundle.cost
        tokens[chosen] += bundle.num_tokens
    return bins


def _count_pairs(length: int) -> int:
    return math.comb(length + 1, 2)
