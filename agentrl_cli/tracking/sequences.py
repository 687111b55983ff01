"""Interactions to token sequences: the one place where turns are merged.

A turn whose prompt and completion ids are a prefix of the next turn's prompt is
part of the same sequence, so that every sampled token is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from agentrl_cli.records import Interaction, InteractionStatus

ExportStyle = Literal["concat", "individual"]


@dataclass(frozen=True, slots=True)
class Span:
    """Where one interaction's completion lies in a sequence: tokens ``start`` to ``end`` - 1."""

    interaction: Interaction
    start: int
    end: int
    trained: bool
    """False: another sequence trains these tokens, or they carry no gradient (greedy)."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One flat token sequence; all per-token tuples have the length of ``input_ids``."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    """True = trained on."""
    rollout_logprobs: tuple[float, ...]
    """0.0 where not sampled."""
    versions: tuple[int, ...]
    """-1 where not sampled."""
    spans: tuple[Span, ...]
    """The merged turns, in order."""

    @property
    def last(self) -> Interaction:
        """The interaction that the sequence ends with."""
        return self.spans[-1].interaction


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
        return [_merge([i], trained_ids=set()) for i in usable.values()]
    extended = {i.parent_id for i in usable.values() if _extends(i, usable)}
    trained_ids: set[str] = set()
    sequences = []
    for last in usable.values():
        if last.id not in extended:
            sequences.append(_merge(_chain(last, usable), trained_ids))
    return sequences


def _extends(interaction: Interaction, usable: dict[str, Interaction]) -> bool:
    return interaction.extends_parent and interaction.parent_id in usable


def _chain(last: Interaction, usable: dict[str, Interaction]) -> list[Interaction]:
    """The turns that end in ``last``, each extending the one before it."""
    chain = [last]
    while _extends(chain[-1], usable):
        chain.append(usable[chain[-1].parent_id or ""])
    return chain[::-1]


def _merge(chain: list[Interaction], trained_ids: set[str]) -> TokenSequence:
    """One sequence of the chain's turns; adds the turns it trains to ``trained_ids``."""
    last = chain[-1]
    input_ids = last.prompt_ids + last.completion_ids
    loss_mask = [False] * len(input_ids)
    logprobs = [0.0] * len(input_ids)
    versions = [-1] * len(input_ids)
    spans = []
    for turn in chain:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.completion_ids)
        trained = turn.id not in trained_ids and turn.temperature > 0
        trained_ids.add(turn.id)
        loss_mask[start:end] = [trained] * (end - start)
        logprobs[start:end] = turn.rollout_logprobs
        versions[start:end] = turn.versions
        spans.append(Span(turn, start, end, trained))
    return TokenSequence(
        input_ids, tuple(loss_mask), tuple(logprobs), tuple(versions), tuple(spans)
    )
