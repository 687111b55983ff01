"""The policy in shards over ranks; see ``ranks.py`` for how they make one update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.train.checkpoint import STATE_DIR, save_optimizer_state
from agentrl_cli.train.logprobs import ScoringModule, TokenLogprobs, score_samples
from agentrl_cli.train.optimizer import MasterOptimizer
from agentrl_cli.train.packing import MicroBatch
from agentrl_cli.train.policy import Policy
from agentrl_cli.train.process_ranks import ProcessRanks
from agentrl_cli.train.published import PublishedWeights, choose_published
from agentrl_cli.train.rank_passes import RankPasses
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.sharded_optimizer import ShardedOptimizer
from agentrl_cli.train.sharding import build_skeleton, gather_model, gather_named, shard_module

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CPU = torch.device("cpu")


class ShardedPolicy(Policy):
    """A policy whose weights lie in shards. All ranks call the same methods in the same order.

    What gives or writes something whole does so on rank 0 and takes part on the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        *,
        ranks: ProcessRanks,
        reference_model: PreTrainedModel | None,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        published: Literal["whole", "adapter"],
    ) -> None:
        """Takes ``model`` over; the arguments are those of :class:`Learner`. Sends nothing, so
        that ranks may load their models one after the other."""
        self._ranks = ranks
        self._published_kind = published
        # A whole copy of the weights as they are, where a diagnosis has asked for it.
        self._whole: PreTrainedModel | None = None
        self._has_gathered = False
        super().__init__(
            model,
            config,
            reference_model=reference_model,
            tokenizer=tokenizer,
            device=device,
            published=published,
        )

    def _build_optimizer(self, dtype: torch.dtype) -> MasterOptimizer:
        # Tied names are known by their tensors, which shards have not.
        self._names = self._published.names()
        self._skeleton = build_skeleton(self.model, dtype)
        self._passes = self._shard(self.model, dtype)
        self._reference_passes = (
            None if self._reference is None else self._shard(self._reference, dtype)
        )
        return ShardedOptimizer(self.model, self._config.train, dtype, self._ranks)

    def _shard(self, model: PreTrainedModel, dtype: torch.dtype) -> RankPasses[TokenLogprobs]:
        root = shard_module(ScoringModule(model), model, self._ranks.mesh, dtype)
        return RankPasses(
            root,
            lambda output: output.logprobs,
            self._ranks,
            max_tokens=self._config.train.micro_batch_tokens,
            packing=self._config.train.packing,
            device=self.device,
        )

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this rank's share of ``samples``."""
        self._forget_whole()
        return self._passes.pack(samples)

    def catch_up(self) -> None:
        """Makes as many backward passes as the busiest rank."""
        self._passes.catch_up()

    def forward(self, batch: MicroBatch) -> TokenLogprobs:
        """Logprobs of the micro-batch's targets, with gradient."""
        return self._passes.forward(batch)

    def score(
        self, samples: Sequence[Sample], replaced: Mapping[str, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """As that of one process, on all ranks.

        With ``replaced`` rank 0 computes alone, on a whole copy of the weights, which it keeps
        until they change: it is asked for after another, when a publication has gone wrong.
        """
        if not replaced:
            return self._passes.score(samples)
        if not self._has_gathered:
            self._whole, self._has_gathered = self._gather(_CPU), True
        if self._whole is None:
            return {}
        published = self._choose_published(self._whole)
        located: dict[str, Tensor] = {}
        for name, tensor in replaced.items():
            located |= published.locate(name, tensor)
        train = self._config.train
        return score_samples(
            self._whole,
            samples,
            train.micro_batch_tokens,
            _CPU,
            packing=train.packing,
            replaced=located,
        )

    def score_reference(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """The same by the reference model; with an adapter, by the model without it."""
        if self._reference_passes is not None:
            return self._reference_passes.score(samples)
        self.model.disable_adapters()
        try:
            return self._passes.score(samples)
        finally:
            self.model.enable_adapters()

    def weights(self) -> dict[str, Tensor]:
        """The published tensors on rank 0, in copies; nothing on the others.

        The copies lie where the model is, as a transfer by NCCL needs them, and on the CPU where
        files are asked for: a large model has no room for a whole copy on one GPU.
        """
        is_adapter = self._published_kind == "adapter"
        to_files = self._config.engine.weight_transfer.kind == "disk"
        whole = self._gather(
            _CPU if to_files else self.device, _is_of_adapter if is_adapter else None
        )
        return {} if whole is None else self._choose_published(whole).tensors()

    def published_names(self) -> Mapping[str, str]:
        """Every name of a published tensor -> the one it has in :meth:`weights`."""
        return self._names

    def save(self, folder: Path) -> None:
        """Writes on rank 0 what one process writes."""
        keep = self._ranks.index == 0
        whole = self._gather(_CPU, _is_of_adapter if self._has_adapter else None)
        if whole is not None:
            self._write_weights(folder, whole)
        # The largest thing that stands whole is one of the two below.
        del whole
        masters = None
        if self.optimizer.has_masters:
            masters = gather_named(self.optimizer.master_weights(), keep=keep)
        state = gather_named(self.optimizer.state_tensors(), keep=keep)
        if keep:
            save_optimizer_state(folder / STATE_DIR, state, masters)

    def load(self, folder: Path) -> None:
        """Takes this rank's shards of what any number of ranks saved; one rank at a time reads,
        so that one whole copy stands in memory."""
        self._forget_whole()
        for turn in range(self._ranks.count):
            if turn == self._ranks.index:
                super().load(folder)
            self._ranks.barrier()

    def _forget_whole(self) -> None:
        self._whole, self._has_gathered = None, False

    def _gather(
        self, device: torch.device, wanted: Callable[[str], bool] | None = None
    ) -> PreTrainedModel | None:
        return gather_model(
            self._skeleton,
            self.model,
            keep=self._ranks.index == 0,
            device=device,
            wanted=wanted or (lambda _: True),
        )

    def _choose_published(self, whole: PreTrainedModel) -> PublishedWeights:
        return choose_published(whole, self._published_kind, has_adapter=self._has_adapter)

    @property
    def _has_adapter(self) -> bool:
        return self._config.model.lora is not None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name
