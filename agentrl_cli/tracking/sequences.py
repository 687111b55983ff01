"""Interactions to token sequences: the one place where turns are merged.

A turn whose prompt and completion ids are a prefix of the next turn's prompt is part of the same
sequence, so that every sampled token is trained exactly once. A workflow exports sequences, and the
trainer makes its samples of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl_cli.records import ExportStyle, Interaction, InteractionStatus

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Span:
    """Where one interaction's completion lies in a sequence: tokens ``start`` to ``end`` - 1."""

    interaction: Interaction
    trained: bool
    """False: another sequence trains these tokens, or they carry no gradient (greedy)."""

    @property
    def start(self) -> int:
        """The completion's first token."""
        return len(self.interaction.prompt_ids)

    @property
    def end(self) -> int:
        """The token after the completion."""
        return self.start + len(self.interaction.completion_ids)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One flat token sequence: an interaction, with all turns that it extends.

    All per-token tuples have the length of ``input_ids``.
    """

    spans: tuple[Span, ...]
    """The merged turns, in order."""
    style: ExportStyle
    """How turns were merged."""

    @property
    def interaction(self) -> Interaction:
        """The interaction that the sequence ends with."""
        return self.spans[-1].interaction

    @property
    def id(self) -> str:
        """The interaction's id."""
        return self.interaction.id

    @property
    def reward(self) -> float | None:
        """The return if credit was handed out, else the interaction's own reward."""
        interaction = self.interaction
        return interaction.reward if interaction.turn_return is None else interaction.turn_return

    @property
    def input_ids(self) -> tuple[int, ...]:
        """The tokens."""
        return self.interaction.prompt_ids + self.interaction.completion_ids

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """True = trained on."""
        return self._spread(False, lambda span: [span.trained] * (span.end - span.start))

    @property
    def rollout_logprobs(self) -> tuple[float, ...]:
        """0.0 where not sampled."""
        return self._spread(0.0, lambda span: span.interaction.rollout_logprobs)

    @property
    def versions(self) -> tuple[int, ...]:
        """-1 where not sampled."""
        return self._spread(-1, lambda span: span.interaction.versions)

    def _spread(self, default: Any, read: Callable[[Span], Sequence[Any]]) -> tuple[Any, ...]:
        """What every span's tokens have, ``default`` for all others."""
        values = [default] * len(self.input_ids)
        for span in self.spans:
            values[span.start : span.end] = read(span)
        return tuple(values)

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of shape [1, T], and ``rewards`` of shape [1].

        ``input_ids`` int64; ``loss_mask`` bool, True = trained on; ``logprobs`` float32,
        the rollout's, 0 where not sampled; ``versions`` int32, -1 where not sampled;
        ``attention_mask`` bool, all True; ``rewards`` float32, NaN when unscored.
        """
        import torch

        reward = float("nan") if self.reward is None else self.reward
        return {
            "input_ids": torch.tensor([self.input_ids], dtype=torch.int64),
            "loss_mask": torch.tensor([self.loss_mask], dtype=torch.bool),
            "logprobs": torch.tensor([self.rollout_logprobs], dtype=torch.float32),
            "versions": torch.tensor([self.versions], dtype=torch.int32),
            "attention_mask": torch.ones((1, len(self.input_ids)), dtype=torch.bool),
            "rewards": torch.tensor([reward], dtype=torch.float32),
        }


def build_sequences(interactions: Iterable[Interaction], style: ExportStyle) -> list[TokenSequence]:
    """The token sequences of one trajectory, in the order in which their last turns began.

    ``concat`` merges every chain of turns that extend each other; where branches share
    turns, the first branch in time trains them and the others mask them. ``individual``
    gives one sequence per interaction. Failed and unfinished calls, and calls without
    token ids, give none.
    """
    usable = {
        i.id: i
        for i in sorted(interactions, key=lambda i: i.started)
        if i.status is InteractionStatus.COMPLETED and i.completion_ids
    }
    if style == "individual":
        chains = [[interaction] for interaction in usable.values()]
    else:
        extended = {i.parent_id for i in usable.values() if _extends(i, usable)}
        chains = [_chain(last, usable) for last in usable.values() if last.id not in extended]
    seen: set[str] = set()
    sequences = []
    for chain in chains:
        spans = [Span(turn, turn.id not in seen and turn.temperature > 0) for turn in chain]
        seen.update(turn.id for turn in chain)
        sequences.append(TokenSequence(tuple(spans), style))
    return sequences


def _extends(interaction: Interaction, usable: dict[str, Interaction]) -> bool:
    return interaction.extends_parent and interaction.parent_id in usable


def _chain(last: Interaction, usable: dict[str, Interaction]) -> list[Interaction]:
    """The turns that end in ``last``, each extending the one before it."""
    chain = [last]
    while _extends(chain[-1], usable):
        chain.append(usable[chain[-1].parent_id or ""])
    return chain[::-1]
