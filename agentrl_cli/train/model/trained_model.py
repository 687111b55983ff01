"""A model in training, and how the ranks divide its passes among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import StoreError
from agentrl_cli.store.layout import describe
from agentrl_cli.train.checkpoint import save_optimizer_state
from agentrl_cli.train.data.packing import MicroBatch, pack_samples
from agentrl_cli.train.data.samples import Sample, build_scoring_sample
from agentrl_cli.train.model.optimizer import MasterOptimizer
from agentrl_cli.train.model.sharding import gather_named, shard_module
from agentrl_cli.train.ranks import Ranks

Output = TypeVar("Output")


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """This rank's part of the passes of some samples."""

    batches: Sequence[MicroBatch]
    """Of this rank's share of them."""
    num_missing: int
    """How many passes more the busiest rank makes."""


class ModelPasses(Generic[Output]):
    """Passes of samples through a model, which is sharded where there are several ranks.

    Each rank makes those of its share of the samples, and all make equally many, since all
    take part in a pass through a sharded model.

    Args:
        root: called with a micro-batch; sharded here, in place.
        model: in ``root``; has the layers.
        train: how micro-batches are filled.
        dtype: in which a sharded model computes.
        ranks: train together, and call all methods in the same order.
        device: on which micro-batches are made.
        take_values: one number for each target, of what ``root`` gives.
    """

    def __init__(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        *,
        train: TrainConfig,
        dtype: torch.dtype,
        ranks: Ranks,
        device: torch.device,
        take_values: Callable[[Output], Tensor],
    ) -> None:
        self.device = device
        self._root = root
        self._train = train
        self._ranks = ranks
        self._take_values = take_values
        # With a target, so that every weight has a gradient, and 0 is added to each.
        nothing = build_scoring_sample([0, 0], 1, temperature=1.0, top_p=1.0)
        [self._nothing] = pack_samples([nothing], 2, device)
        if ranks.mesh is not None:
            shard_module(root, model, ranks.mesh, dtype)

    def pack(self, samples: Sequence[Sample]) -> PackedSamples:
        """The micro-batches of this rank's share of ``samples``, which all ranks know."""
        train = self._train
        chosen = [samples[i] for i in self._find_share(samples)]
        batches = pack_samples(chosen, train.micro_batch_tokens, self.device, train.packing)
        num_missing = max(self._ranks.gather_objects(len(batches))) - len(batches)
        return PackedSamples(batches, num_missing)

    def forward(self, batch: MicroBatch) -> Output:
        """What the model gives for a micro-batch, with gradient."""
        output: Output = self._root(batch)
        return output

    def catch_up(self, packed: PackedSamples) -> None:
        """Called after the backward passes of the micro-batches of ``packed``: makes empty ones
        until this rank has made as many as the busiest."""
        for _ in range(packed.num_missing):
            (self._take_values(self.forward(self._nothing)).sum() * 0.0).backward()  # type: ignore[no-untyped-call]

    def score(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The values of each sample's targets, float32 [targets] on the CPU, by ``id(sample)``.

        On every rank those of all samples, though each passes its share alone.
        """
        scored = self.score_packed(self.pack(samples))
        own = [scored[id(samples[i])] for i in self._find_share(samples)]
        joined = torch.cat([torch.zeros(0), *own])
        everything = torch.cat(self._ranks.gather_tensors(joined))
        # Shares are neighbours, so that their values one after the other are those of all.
        parts = torch.split(everything, [s.num_targets for s in samples])
        return {id(s): part for s, part in zip(samples, parts, strict=True)}

    @torch.no_grad()
    def score_packed(self, packed: PackedSamples) -> dict[int, Tensor]:
        """As :meth:`score`, of this rank's share alone.

        With unchanged weights, an update from ``packed`` computes the very same numbers: how
        samples are packed changes the rounding.
        """
        scored: dict[int, Tensor] = {}
        for batch in packed.batches:
            scored |= batch.split(self._take_values(self.forward(batch)))
        for _ in range(packed.num_missing):
            self.forward(self._nothing)
        if isinstance(self._root, FSDPModule):
            # Without a backward pass the root's weights would stay gathered, and become stale.
            self._root.reshard()
        return scored

    def _find_share(self, samples: Sequence[Sample]) -> range:
        costs = [sample.num_tokens for sample in samples]
        return divide_evenly(costs, self._ranks.count)[self._ranks.index]


class TrainedModel(ModelPasses[Output]):
    """A model with its optimizer: the policy, or its critic."""

    role: Literal["policy", "critic"]
    optimizer: MasterOptimizer

    def save_state(self, folder: Path, *, with_masters: bool) -> None:
        """Writes the optimizer's state, and its float32 weights, whole, into ``folder``: on rank 0,
        while the others take part.

        Raises:
            StoreError: it cannot be written.
        """
        keep = self._ranks.index == 0
        of_masters = self.optimizer.master_weights() if with_masters else None
        masters = None if of_masters is None else gather_named(of_masters, keep=keep)
        state = gather_named(self.optimizer.state_tensors(), keep=keep)
        if keep:
            save_optimizer_state(folder, state, masters)

    def load_state(
        self, folder: Path, load: Callable[[], Mapping[str, Tensor]], state: Mapping[str, Tensor]
    ) -> None:
        """Takes over the whole weights that ``load`` gives and the optimizer's ``state``, of the
        checkpoint ``folder``.

        Raises:
            StoreError: they are of another model.
        """
        try:
            self.optimizer.load_master_weights(load())
            self.optimizer.load_state_tensors(state)
        except (KeyError, RuntimeError) as error:
            part = "" if self.role == "policy" else f"the {self.role} in "
            message = f"{part}the checkpoint {describe(folder)} is of another model: {error}"
            raise StoreError(message) from error


def divide_evenly(costs: Sequence[int], count: int) -> list[range]:
    """``count`` runs of neighbours that cover all positions, the costliest as cheap as can be.

    Neighbours stay together because samples of one group share prefixes, which are computed once
    by the rank that has them. The costliest run is above the mean by less than the largest cost.
    Runs may be empty. The result depends on the arguments only.

    Args:
        costs: of each sample, not negative: its tokens.
        count: of ranks.
    """
    lowest, highest = max([*costs, -(-sum(costs) // count)]), sum(costs)
    while lowest < highest:
        middle = (lowest + highest) // 2
        if len(_cut(costs, middle)) <= count:
            highest = middle
        else:
            lowest = middle + 1
    runs = _cut(costs, lowest)
    return runs + [range(len(costs), len(costs))] * (count - len(runs))


def _cut(costs: Sequence[int], limit: int) -> list[range]:
    """Runs of at most ``limit``, which is no less than any cost, each as long as can be."""
    runs: list[range] = []
    start, total = 0, 0
    for position, cost in enumerate(costs):
        if total + cost > limit:
            runs.append(range(start, position))
            start, total = position, 0
        total += cost
    runs.append(range(start, len(costs)))
    return runs
