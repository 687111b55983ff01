"""Breaks of conversations: how many, what each costs in tokens, and what to do about it.

A turn is broken when its request goes back to an earlier turn of the session and that
turn's tokens could not simply be continued (``Interaction.break_cause`` says why). This is
the one place that says what a break costs:

The *broken turn's sequence* is what the session had computed before: prompt and completion
ids of the parent, where the request found one that it could not extend, else of the earlier
completed turn with which the request shares the most tokens from the beginning (of several,
the one that ended last). Request and sequence part at one position; behind it

- *recomputed tokens* are the request's prompt tokens up to the sequence's length: history
  that was tokenized and computed anew. What lies beyond that length is new in any case, and
  costs nothing extra;
- *departed tokens* are the sequence's sampled tokens: they are trained where they were
  sampled, but the turns from here on no longer have them as their context.

A break after which the engine's prefix cache and the merged training sample could both go on
would have 0 of each. Calls that did not complete are not counted, nor what has no token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from agentrl_cli.records import BreakCause, Interaction, InteractionStatus, Trajectory

#: What to change, in one line; the same words wherever a break is shown.
REMEDIES: Mapping[BreakCause, str] = {
    BreakCause.THINKING_STRIPPED: (
        "type engine.keep_thinking=true: thoughts stay in the context, as they were sampled"
    ),
    BreakCause.HISTORY_EDITED: (
        "stop the agent from rewriting its history. CAMEL: no token_limit, "
        "message_window_size=None, summarize_threshold=None; OpenAI Agents: no input_filter of "
        "handoffs, session_input_callback or call_model_input_filter; LangGraph: no "
        "trim_messages or pre_model_hook; own loops: append the reply as it came"
    ),
    BreakCause.TOOL_ARGUMENTS_CHANGED: (
        "send a tool call back with the arguments it came with: no defaults filled in, nothing "
        "repaired or dropped"
    ),
    BreakCause.TEMPLATE_CHANGED: (
        "offer the same tools, in the same order, and the same chat_template_kwargs on every "
        "turn of a conversation; tool_choice='none' takes the tools away for that turn"
    ),
    BreakCause.RETOKENIZED: (
        "set tokenizer_path to a folder whose chat template shows an assistant's content as it "
        "is: this one alters or hides it"
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One broken turn and what it cost."""

    interaction_id: str
    cause: BreakCause
    num_recomputed_tokens: int
    num_departed_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakTotals:
    """Broken turns of one cause, and what they cost together."""

    num_turns: int = 0
    num_recomputed_tokens: int = 0
    num_departed_tokens: int = 0

    def __add__(self, other: BreakTotals) -> BreakTotals:
        return BreakTotals(
            num_turns=self.num_turns + other.num_turns,
            num_recomputed_tokens=self.num_recomputed_tokens + other.num_recomputed_tokens,
            num_departed_tokens=self.num_departed_tokens + other.num_departed_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakSummary:
    """The breaks of some trajectories."""

    num_replaying_turns: int = 0
    """Completed turns whose request goes back to an earlier one: those that could break."""
    by_cause: Mapping[BreakCause, BreakTotals] = field(default_factory=dict)
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
                BreakCause(cause): BreakTotals(**totals)
                for cause, totals in data["by_cause"].items()
            },
        )

    @property
    def total(self) -> BreakTotals:
        """Over all causes."""
        return sum(self.by_cause.values(), BreakTotals())

    @property
    def broken_fraction(self) -> float:
        """The share of the turns that could break which did; 0.0 where none could."""
        return self.total.num_turns / self.num_replaying_turns if self.num_replaying_turns else 0.0

    def __add__(self, other: BreakSummary) -> BreakSummary:
        by_cause = {
            cause: self.by_cause.get(cause, BreakTotals())
            + other.by_cause.get(cause, BreakTotals())
            for cause in BreakCause
            if cause in self.by_cause or cause in other.by_cause
        }
        return BreakSummary(
            num_replaying_turns=self.num_replaying_turns + other.num_replaying_turns,
            by_cause=by_cause,
        )


def format_break_totals(totals: BreakTotals) -> str:
    """``3 turns, 812 prompt tokens computed anew, 64 sampled tokens left the context``."""
    plural = "" if totals.num_turns == 1 else "s"
    return f"{totals.num_turns} turn{plural}, " + format_break_cost(
        totals.num_recomputed_tokens, totals.num_departed_tokens
    )


def format_break_cost(num_recomputed_tokens: int, num_departed_tokens: int) -> str:
    """The tokens in words."""
    return (
        f"{num_recomputed_tokens:,} prompt tokens computed anew, "
        f"{num_departed_tokens:,} sampled tokens left the context"
    )


def summarize_breaks(trajectories: Iterable[Trajectory]) -> BreakSummary:
    """The breaks of all ``trajectories`` together."""
    return sum((_summarize(t.interactions) for t in trajectories), BreakSummary())


def find_breaks(interactions: Sequence[Interaction]) -> list[Break]:
    """The broken turns of one trajectory, in the order of its interactions."""
    completed = {i.id: i for i in interactions if i.status is InteractionStatus.COMPLETED}
    return [_measure(i, completed) for i in completed.values() if i.break_cause is not None]


def _summarize(interactions: Sequence[Interaction]) -> BreakSummary:
    by_cause: dict[BreakCause, BreakTotals] = {}
    for one in find_breaks(interactions):
        by_cause[one.cause] = by_cause.get(one.cause, BreakTotals()) + BreakTotals(
            num_turns=1,
            num_recomputed_tokens=one.num_recomputed_tokens,
            num_departed_tokens=one.num_departed_tokens,
        )
    num_replaying_turns = sum(
        i.status is InteractionStatus.COMPLETED
        and (i.parent_id is not None or i.break_cause is not None)
        for i in interactions
    )
    return BreakSummary(num_replaying_turns=num_replaying_turns, by_cause=by_cause)


def _measure(interaction: Interaction, completed: Mapping[str, Interaction]) -> Break:
    assert interaction.break_cause is not None
    turn, num_shared = _find_broken_turn(interaction, completed)
    num_recomputed = num_departed = 0
    if turn is not None:
        length = len(turn.prompt_ids) + len(turn.completion_ids)
        num_recomputed = max(min(len(interaction.prompt_ids), length) - num_shared, 0)
        num_departed = _count_sampled_behind(num_shared, turn, completed)
    return Break(
        interaction_id=interaction.id,
        cause=interaction.break_cause,
        num_recomputed_tokens=num_recomputed,
        num_departed_tokens=num_departed,
    )


def _find_broken_turn(
    interaction: Interaction, completed: Mapping[str, Interaction]
) -> tuple[Interaction | None, int]:
    """The turn whose sequence was not continued, and how many tokens it shares with the request."""
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


def _count_sampled_behind(
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
