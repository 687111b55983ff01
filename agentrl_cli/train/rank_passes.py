"""Passes through a sharded model: every rank makes its share, and all make equally many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from agentrl_cli.train.packing import MicroBatch, Packing, pack_samples
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.samples import Sample, build_scoring_sample
from agentrl_cli.train.shares import divide_evenly

Output = TypeVar("Output")


class RankPasses(Generic[Output]):
    """The passes of one rank through a model that all ranks hold together.

    Args:
        root: the sharded module, called with a micro-batch.
        take_values: of its output, one number for each target.
        ranks: the others.
        max_tokens: of a micro-batch.
        packing: how micro-batches are filled.
        device: on which micro-batches are made.
    """

    def __init__(
        self,
        root: FSDPModule,
        take_values: Callable[[Output], Tensor],
        ranks: Ranks,
        *,
        max_tokens: int,
        packing: Packing,
        device: torch.device,
    ) -> None:
        self._root = root
        self._take_values = take_values
        self._ranks = ranks
        self._max_tokens = max_tokens
        self._packing = packing
        self._device = device
        self._num_missing = 0
        # With a target, so that every weight has a gradient, and 0 is added to each.
        nothing = build_scoring_sample([0, 0], 1, temperature=1.0, top_p=1.0)
        [self._nothing] = pack_samples([nothing], 2, device)

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this rank's share of ``samples``, which all ranks know."""
        return self._pack(samples, self._divide(samples)[self._ranks.index])

    def forward(self, batch: MicroBatch) -> Output:
        """What the module gives for a micro-batch."""
        return self._root(batch)  # type: ignore[operator]

    def catch_up(self) -> None:
        """After the backward passes of :meth:`pack`'s micro-batches: makes those that the
        busiest rank made more, of nothing."""
        for _ in range(self._num_missing):
            (self._take_values(self.forward(self._nothing)).sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The values of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``.

        On every rank those of all samples, though each passes its share alone.
        """
        shares = self._divide(samples)
        own = shares[self._ranks.index]
        scored: dict[int, Tensor] = {}
        for batch in self._pack(samples, own):
            values = self._take_values(self.forward(batch)).float().cpu()
            parts = torch.split(values, [s.num_targets for s in batch.samples])
            scored |= {id(s): part for s, part in zip(batch.samples, parts, strict=True)}
        for _ in range(self._num_missing):
            self.forward(self._nothing)
        # Without a backward pass the root's weights would stay put together, and grow old.
        self._root.reshard()
        joined = torch.cat([torch.zeros(0), *(scored[id(samples[i])] for i in own)])
        everything = torch.cat(self._ranks.gather_tensors(joined))
        # Shares are neighbours, so that their values one after the other are those of all.
        parts = torch.split(everything, [s.num_targets for s in samples])
        return {id(s): part for s, part in zip(samples, parts, strict=True)}

    def _divide(self, samples: Sequence[Sample]) -> list[range]:
        return divide_evenly([sample.num_tokens for sample in samples], self._ranks.count)

    def _pack(self, samples: Sequence[Sample], share: range) -> list[MicroBatch]:
        chosen = [samples[i] for i in share]
        batches = pack_samples(chosen, self._max_tokens, self._device, self._packing)
        most = max(self._ranks.gather_objects(len(batches)))
        self._num_missing = most - len(batches)
        return batches
