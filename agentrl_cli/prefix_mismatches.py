"""Prefix mismatches: how many, what each costs in tokens, and what to do about them.

A turn has a prefix mismatch when its request goes back to an earlier turn of the session but its
prompt does not begin with that turn's tokens (``Interaction.mismatch_cause`` says why). What a
mismatch costs is defined here and nowhere else:

The *earlier sequence* is what the session had computed before: prompt and completion ids of the
parent, where the request found one that it could not extend, else of the earlier completed turn
that shares the longest prefix with the request (of several, the one that ended last). Request and
sequence diverge at one position; after it

- *re-prefilled tokens* are the request's prompt tokens up to the sequence's length: history that
  was tokenized and computed again. What lies beyond that length is new in any case, and costs
  nothing extra;
- *dropped tokens* are the sequence's sampled tokens: they are trained where they were sampled, but
  later turns no longer have them in their context.

A mismatch after which the engine's prefix cache and the merged training sample could both continue
has 0 of each. Calls that did not complete are not counted, nor are calls without token ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from agentrl_cli.records import Interaction, InteractionStatus, MismatchCause, Trajectory

#: What to change, in one line; the same words wherever a mismatch is shown.
REMEDIES: Mapping[MismatchCause, str] = {
    MismatchCause.THINKING_STRIPPED: (
        "type engine.keep_reasoning=true: reasoning stays in the context as it was sampled"
    ),
    MismatchCause.HISTORY_EDITED: (
        "keep the agent from rewriting its history. CAMEL: no token_limit, "
        "message_window_size=None, summarize_threshold=None; OpenAI Agents: no input_filter of "
        "handoffs, session_input_callback or call_model_input_filter; LangGraph: no "
        "trim_messages or pre_model_hook; own loops: append the reply as it came. A key that the "
        "chat template shows (such as a name) must not be added to it either"
    ),
    MismatchCause.TOOL_ARGUMENTS_CHANGED: (
        "send a tool call back with the arguments it came with: no defaults filled in, nothing "
        "repaired or dropped"
    ),
    MismatchCause.TEMPLATE_CHANGED: (
        "offer the same tools, in the same order, and the same chat_template_kwargs on every "
        "turn of a conversation"
    ),
    MismatchCause.RETOKENIZED: (
        "set tokenizer_path to a folder whose chat template shows an assistant's content as it "
        "is: this one alters or hides it"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMismatch:
    """One turn with a mismatch, and what it cost."""

    interaction_id: str
    cause: MismatchCause
    num_reprefilled_tokens: int
    num_dropped_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchTotals:
    """The mismatches of one cause, and what they cost together."""

    num_turns: int = 0
    num_reprefilled_tokens: int = 0
    num_dropped_tokens: int = 0

    def __add__(self, other: MismatchTotals) -> MismatchTotals:
        return MismatchTotals(
            num_turns=self.num_turns + other.num_turns,
            num_reprefilled_tokens=self.num_reprefilled_tokens + other.num_reprefilled_tokens,
            num_dropped_tokens=self.num_dropped_tokens + other.num_dropped_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchSummary:
    """The prefix mismatches of some trajectories."""

    num_replaying_turns: int = 0
    """Completed turns whose request goes back to an earlier one: only those can mismatch."""
    by_cause: Mapping[MismatchCause, MismatchTotals] = field(default_factory=dict)
    """Only causes that occurred."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The summary that ``to_dict`` wrote.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is no such summary.
        """
        by_cause = {MismatchCause(c): MismatchTotals(**t) for c, t in data["by_cause"].items()}
        return cls(num_replaying_turns=data["num_replaying_turns"], by_cause=by_cause)

    @property
    def total(self) -> MismatchTotals:
        """Over all causes."""
        return sum(self.by_cause.values(), MismatchTotals())

    @property
    def mismatch_fraction(self) -> float:
        """The share of the replaying turns that have a mismatch; 0.0 where no turn replays."""
        return self.total.num_turns / self.num_replaying_turns if self.num_replaying_turns else 0.0

    def __add__(self, other: MismatchSummary) -> MismatchSummary:
        by_cause = dict(self.by_cause)
        for cause, totals in other.by_cause.items():
            by_cause[cause] = by_cause.get(cause, MismatchTotals()) + totals
        num_replaying_turns = self.num_replaying_turns + other.num_replaying_turns
        return MismatchSummary(num_replaying_turns=num_replaying_turns, by_cause=by_cause)


def format_mismatch_totals(totals: MismatchTotals) -> str:
    """``3 turns, 812 prompt tokens re-prefilled, 64 sampled tokens dropped``."""
    plural = "" if totals.num_turns == 1 else "s"
    return f"{totals.num_turns} turn{plural}, " + format_mismatch_cost(
        totals.num_reprefilled_tokens, totals.num_dropped_tokens
    )


def format_mismatch_cost(num_reprefilled_tokens: int, num_dropped_tokens: int) -> str:
    """The tokens in words."""
    return (
        f"{num_reprefilled_tokens:,} prompt tokens re-prefilled, "
        f"{num_dropped_tokens:,} sampled tokens dropped"
    )


def summarize_prefix_mismatches(trajectories: Iterable[Trajectory]) -> MismatchSummary:
    """The mismatches of all ``trajectories`` together."""
    return sum((_summarize(t.interactions) for t in trajectories), MismatchSummary())


def find_prefix_mismatches(interactions: Sequence[Interaction]) -> list[PrefixMismatch]:
    """The mismatches of one trajectory, in the order of its interactions."""
    completed = {i.id: i for i in interactions if i.status is InteractionStatus.COMPLETED}
    return [_measure(i, completed) for i in completed.values() if i.mismatch_cause is not None]


def _summarize(interactions: Sequence[Interaction]) -> MismatchSummary:
    by_cause: dict[MismatchCause, MismatchTotals] = {}
    for one in find_prefix_mismatches(interactions):
        by_cause[one.cause] = by_cause.get(one.cause, MismatchTotals()) + MismatchTotals(
            num_turns=1,
            num_reprefilled_tokens=one.num_reprefilled_tokens,
            num_dropped_tokens=one.num_dropped_tokens,
        )
    completed = (i for i in interactions if i.status is InteractionStatus.COMPLETED)
    replaying = [i for i in completed if i.parent_id is not None or i.mismatch_cause is not None]
    return MismatchSummary(num_replaying_turns=len(replaying), by_cause=by_cause)


def _measure(interaction: Interaction, completed: Mapping[str, Interaction]) -> PrefixMismatch:
    assert interaction.mismatch_cause is not None
    num_reprefilled = num_dropped = 0
    earlier = _list_earlier(interaction, completed)
    if earlier:
        num_shared, _, turn = max(
            ((_count_shared(interaction, i), i.ended or 0, i) for i in earlier),
            key=lambda found: found[:2],
        )
        num_reprefilled = max(min(len(interaction.prompt_ids), _length(turn)) - num_shared, 0)
        num_dropped = _count_sampled_after(num_shared, turn, completed)
    return PrefixMismatch(
        interaction_id=interaction.id,
        cause=interaction.mismatch_cause,
        num_reprefilled_tokens=num_reprefilled,
        num_dropped_tokens=num_dropped,
    )


def _list_earlier(
    interaction: Interaction, completed: Mapping[str, Interaction]
) -> list[Interaction]:
    """The turns of which one ends the earlier sequence."""
    parent = completed.get(interaction.parent_id or "")
    if parent is not None and not interaction.extends_parent:
        return [parent]
    return [
        i
        for i in completed.values()
        if i.prompt_ids and i.ended is not None and i.ended <= interaction.started
    ]


def _length(turn: Interaction) -> int:
    return len(turn.prompt_ids) + len(turn.completion_ids)


def _count_shared(interaction: Interaction, turn: Interaction) -> int:
    """How many tokens the request and the turn's sequence both begin with."""
    ids, other = tuple(interaction.prompt_ids), (*turn.prompt_ids, *turn.completion_ids)
    # By halves: comparing slices is a hundred times faster than a loop over tokens.
    lengths = range(1, min(len(ids), len(other)) + 1)
    return bisect_left(lengths, True, key=lambda length: ids[:length] != other[:length])


def _count_sampled_after(
    position: int, turn: Interaction, completed: Mapping[str, Interaction]
) -> int:
    """Sampled tokens of the turn's sequence at ``position`` or after it."""
    num_sampled = 0
    current: Interaction | None = turn
    while current is not None and _length(current) > position:
        num_sampled += _length(current) - max(len(current.prompt_ids), position)
        parent = completed.get(current.parent_id or "") if current.extends_parent else None
        # Parents come before their children: damaged data cannot make a circle.
        current = parent if parent is not None and parent.started < current.started else None
    return num_sampled
