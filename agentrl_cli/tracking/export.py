"""What a user's workflow takes out of a session: interactions as training material."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl_cli.records import Interaction
from agentrl_cli.tracking.sequences import ExportStyle, TokenSequence, build_sequences

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ExportedInteraction:
    """One interaction, with the token sequence that ends in it."""

    sequence: TokenSequence

    @property
    def interaction(self) -> Interaction:
        """The interaction itself; with style ``concat``, the last of its chain."""
        return self.sequence.last

    @property
    def id(self) -> str:
        """The interaction's id."""
        return self.interaction.id

    @property
    def reward(self) -> float | None:
        """The return if credit was handed out, else the interaction's own reward."""
        interaction = self.interaction
        return interaction.reward if interaction.turn_return is None else interaction.turn_return

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of shape [1, T], and ``rewards`` of shape [1].

        ``input_ids`` int64; ``loss_mask`` bool, True = trained on; ``logprobs`` float32,
        the rollout's, 0 where not sampled; ``versions`` int32, -1 where not sampled;
        ``attention_mask`` bool, all True; ``rewards`` float32, NaN when unscored.
        """
        import torch

        sequence = self.sequence
        reward = float("nan") if self.reward is None else self.reward
        return {
            "input_ids": torch.tensor([sequence.input_ids], dtype=torch.int64),
            "loss_mask": torch.tensor([sequence.loss_mask], dtype=torch.bool),
            "logprobs": torch.tensor([sequence.rollout_logprobs], dtype=torch.float32),
            "versions": torch.tensor([sequence.versions], dtype=torch.int32),
            "attention_mask": torch.ones((1, len(sequence.input_ids)), dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


def export_interactions(
    interactions: Iterable[Interaction], style: ExportStyle
) -> dict[str, ExportedInteraction]:
    """Exported interactions by id; with ``concat``, one for every merged sequence."""
    return {s.last.id: ExportedInteraction(s) for s in build_sequences(interactions, style)}
