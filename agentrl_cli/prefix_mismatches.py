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
        "trim_messages or pre_model_hook; own loops: append the reply as it came"
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
        return {
            "num_replaying_turns": self.num_replaying_turns,
            "by_cause": {cause.value: asdict(totals) for cause, totals in self.by_cause.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The summary that ``to_dict`` wrote.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is no such summary.
        """
        return cls(
            num_replaying_turns=data["num_replaying_turns"],
            by_cause={
                MismatchCause(cause): MismatchTotals(**totals)
                for cause, totals in data["by_cause"].items()
            },
        )

    @property
    def total(self) -> MismatchTotals:
        """Over all causes."""
        return sum(self.by_cause.values(), MismatchTotals())

    @property
    def mismatch_fraction(self) -> float:
        """The share of the replaying turns that have a mismatch; 0.0 where no turn replays."""
        return self.total.num_turns / self.num_replaying_turns if self.num_replaying_turns else 0.0

    def __add__(self, other: MismatchSummary) -> MismatchSummary:
        by_cause = {
            cause: self.by_cause.get(cause, MismatchTotals())
            + other.by_cause.get(cause, MismatchTotals())
            for cause in MismatchCause
            if cause in self.by_cause or cause in other.by_cause
        }
        return MismatchSummary(
            num_replaying_turns=self.num_replaying_turns + other.num_replaying_turns,
            by_cause=by_cause,
        )


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
    num_replaying_turns = sum(
        i.status is InteractionStatus.COMPLETED
        and (i.parent_id is not None or i.mismatch_cause is not None)
        for i in interactions
    )
    return MismatchSummary(num_replaying_turns=num_replaying_turns, by_cause=by_cause)


def _measure(interaction: Interaction, completed: Mapping[str, Interaction]) -> PrefixMismatch:
    assert interaction.mismatch_cause is not None
    turn, num_shared = _find_earlier_sequence(interaction, completed)
    num_reprefilled = num_dropped = 0
    if turn is not None:
        length = len(turn.prompt_ids) + len(turn.completion_ids)
        num_reprefilled = max(min(len(interaction.prompt_ids), length) - num_shared, 0)
        num_dropped = _count_sampled_after(num_shared, turn, completed)
    return PrefixMismatch(
        interaction_id=interaction.id,
        cause=interaction.mismatch_cause,
        num_reprefilled_tokens=num_reprefilled,
        num_dropped_tokens=num_dropped,
    )


def _find_earlier_sequence(
    interaction: Interaction, completed: Mapping[str, Interaction]
) -> tuple[Interaction | None, int]:
    """The turn that ends the earlier sequence, and how many tokens it shares with the request."""
    prompt_ids = interaction.prompt_ids
    parent = completed.get(interaction.parent_id or "")
    if parent is not None and not interaction.extends_parent:
        return parent, _count_shared(prompt_ids, parent.prompt_ids + parent.completion_ids, 0)
    earlier = [
        i
        for i in completed.values()
        if i.prompt_ids and i.ended is not None and i.ended <= interaction.started
    ]
    best: Interaction | None = None
    most = -1
    for turn in sorted(earlier, key=lambda i: i.ended or 0, reverse=True):
        num_shared = _count_shared(prompt_ids, turn.prompt_ids + turn.completion_ids, most + 1)
        if num_shared > most:
            best, most = turn, num_shared
    return best, max(most, 0)


def _count_shared(ids: tuple[int, ...], other: tuple[int, ...], at_least: int) -> int:
    """How many tokens both begin with; -1 where that is fewer than ``at_least``."""
    if ids[:at_least] != other[:at_least] or min(len(ids), len(other)) < at_least:
        return -1
    low, high = at_least, min(len(ids), len(other))
    # By halves: comparing slices is a hundred times faster than a loop over tokens.
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _count_sampled_after(
    position: int, turn: Interaction, completed: Mapping[str, Interaction]
) -> int:
    """Sampled tokens of the turn's sequence at ``position`` or after it."""
    num_sampled = 0
    current: Interaction | None = turn
    while current is not None:
        end = len(current.prompt_ids) + len(current.completion_ids)
        if end <= position:
            break
        num_sampled += end - max(len(current.prompt_ids), position)
        parent = completed.get(current.parent_id or "") if current.extends_parent else None
        # Parents come before their children: damaged data cannot make a circle.
        current = parent if parent is not None and parent.started < current.started else None
    return num_sampled
