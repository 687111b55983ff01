"""Samples to micro-batches: packed end to end under a token budget, without padding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.train.samples import Sample, Targets, join_targets


def pack_lengths(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Positions of ``lengths`` in bins whose sums are at most ``max_tokens``.

    First-fit decreasing: at most 11/9 of the best possible number of bins. A longer item
    goes alone. Every position comes exactly once; the result depends on the arguments only.

    Raises:
        ValueError: ``max_tokens`` is not positive.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}: a bin holds at least one token")
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


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some samples end to end, on one device."""

    samples: tuple[Sample, ...]
    lengths: tuple[int, ...]
    """Tokens of each sample, in order."""
    input_ids: Tensor
    """int64 [tokens]."""
    position_ids: Tensor
    """int64 [tokens], from 0 again for every sample."""
    targets: Targets
    """Of all samples, in order; their sources are places in ``input_ids``."""

    @property
    def sequence_numbers(self) -> Tensor:
        """Which of ``samples`` each target is of: int64 [targets]."""
        repeats = torch.tensor([sample.num_targets for sample in self.samples])
        return torch.arange(len(repeats)).repeat_interleave(repeats).to(self.input_ids.device)

    def spread(self, values: Sequence[float]) -> Tensor:
        """One value per sample, repeated over its targets: float32 [targets]."""
        repeats = torch.tensor([sample.num_targets for sample in self.samples])
        spread = torch.tensor(values, dtype=torch.float32).repeat_interleave(repeats)
        return spread.to(self.input_ids.device)


def build_micro_batch(samples: Sequence[Sample], device: torch.device) -> MicroBatch:
    """The samples' tensors end to end, on ``device``."""
    lengths = tuple(sample.num_tokens for sample in samples)
    starts = itertools.accumulate(lengths, initial=0)
    sources = [s.targets.sources + start for s, start in zip(samples, starts, strict=False)]
    return MicroBatch(
        samples=tuple(samples),
        lengths=lengths,
        input_ids=torch.cat([sample.input_ids for sample in samples]).to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths]).to(device),
        targets=join_targets([s.targets for s in samples]).move(torch.cat(sources), device),
    )


def pack_samples(
    samples: Sequence[Sample], max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Micro-batches of at most ``max_tokens`` that hold every sample once."""
    bins = pack_lengths([sample.num_tokens for sample in samples], max_tokens)
    return [build_micro_batch([samples[i] for i in one], device) for one in bins]
