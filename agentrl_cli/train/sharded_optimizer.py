"""AdamW on float32 weights that lie in shards over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from agentrl_cli.config.experiment import TrainConfig
from agentrl_cli.train.optimizer import MasterOptimizer
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.sharding import own_part, place_like

#: As torch adds it, so that clipped gradients are those of one process.
_CLIP_EPSILON = 1e-6


class ShardedOptimizer(MasterOptimizer):
    """The optimizer of a sharded model, whose float32 shards are the master weights.

    Args:
        model: in shards already, of float32.
        config: the training's.
        compute_dtype: to which weights are rounded where they are put together.
        ranks: have the other shards.
    """

    def __init__(
        self, model: nn.Module, config: TrainConfig, compute_dtype: torch.dtype, ranks: Ranks
    ) -> None:
        super().__init__(model, config, torch.float32)
        self._compute_dtype = compute_dtype
        self._ranks = ranks

    @property
    def has_masters(self) -> bool:
        """True: the model computes with roundings of the masters."""
        return self._compute_dtype != torch.float32

    @torch.no_grad()
    def clip_gradients(self) -> float:
        """As that of one process: the norm is of the whole gradient, and the same on each rank."""
        parts = [own_part(p.grad) for p in self._masters.values() if p.grad is not None]
        own = float(torch.nn.utils.get_total_norm(parts)) if parts else 0.0
        norm = math.sqrt(self._ranks.sum([own**2])[0])
        if math.isfinite(norm):
            scale = min(self._max_grad_norm / (norm + _CLIP_EPSILON), 1.0)
            for part in parts:
                part.mul_(scale)
        return norm

    def load_master_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Takes this rank's shards of whole weights; raises as that of one process."""
        masters = self._masters.items()
        super().load_master_weights(
            {name: place_like(weights[name], master) for name, master in masters}
        )

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes this rank's shards of a whole state."""
        super().load_state_tensors(
            {
                name: place_like(tensor, self._masters[name.rpartition("/")[0]])
                for name, tensor in tensors.items()
            }
        )
