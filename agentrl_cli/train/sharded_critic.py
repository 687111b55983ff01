"""The critic in shards over ranks; see ``ranks.py`` for how they make one update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.train.checkpoint import save_optimizer_state
from agentrl_cli.train.critic import CRITIC_DIR, Critic
from agentrl_cli.train.optimizer import MasterOptimizer
from agentrl_cli.train.packing import MicroBatch
from agentrl_cli.train.process_ranks import ProcessRanks
from agentrl_cli.train.rank_passes import RankPasses
from agentrl_cli.train.samples import Sample
from agentrl_cli.train.sharded_optimizer import ShardedOptimizer
from agentrl_cli.train.sharding import gather_named, shard_module


class ShardedCritic(Critic):
    """A critic whose weights lie in shards. All ranks call the same methods in the same order."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: ExperimentConfig,
        device: torch.device,
        ranks: ProcessRanks,
    ) -> None:
        """Takes ``model`` over; the arguments are those of :class:`Critic`. Sends nothing."""
        self._ranks = ranks
        super().__init__(model, config, device)

    def _build_optimizer(self, dtype: torch.dtype) -> MasterOptimizer:
        root = shard_module(self.value_model, self.value_model.model, self._ranks.mesh, dtype)
        self._passes: RankPasses[Tensor] = RankPasses(
            root,
            lambda values: values,
            self._ranks,
            max_tokens=self._train.micro_batch_tokens,
            packing=self._train.packing,
            device=self.device,
        )
        return ShardedOptimizer(self.value_model, self._train, dtype, self._ranks)

    def pack(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches of this rank's share of ``samples``."""
        return self._passes.pack(samples)

    def catch_up(self) -> None:
        """Makes as many backward passes as the busiest rank."""
        self._passes.catch_up()

    def forward(self, batch: MicroBatch) -> Tensor:
        """The values of the micro-batch's targets, float32 [targets], with gradient."""
        return self._passes.forward(batch)

    def score(self, samples: Sequence[Sample]) -> dict[int, Tensor]:
        """As that of one process, on all ranks."""
        return self._passes.score(samples)

    def save(self, folder: Path) -> None:
        """Writes on rank 0 what one process writes."""
        keep = self._ranks.index == 0
        weights = gather_named(self.optimizer.master_weights(), keep=keep)
        state = gather_named(self.optimizer.state_tensors(), keep=keep)
        if keep:
            save_optimizer_state(folder / CRITIC_DIR, state, weights)

    def load(self, folder: Path) -> None:
        """Takes this rank's shards of what any number of ranks saved, one rank after the other."""
        for turn in range(self._ranks.count):
            if turn == self._ranks.index:
                super().load(folder)
            self._ranks.barrier()
