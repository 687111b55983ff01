"""The logprobs that stay as they are during a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.train.packing import MicroBatch


@dataclass(frozen=True, slots=True)
class FixedLogprobs:
    """Logprobs [targets] by ``id(sample)``, made once before the step's first update."""

    proximal: Mapping[int, Tensor] | None
    """None: those of the update's own forward pass."""
    reference: Mapping[int, Tensor] | None
    """None: there is no KL term."""

    def join(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Those of the micro-batch's targets, on its device."""
        return _join(self.proximal, batch), _join(self.reference, batch)


def _join(scored: Mapping[int, Tensor] | None, batch: MicroBatch) -> Tensor | None:
    if scored is None:
        return None
    return torch.cat([scored[id(s)] for s in batch.samples]).to(batch.input_ids.device)
