"""The columns and filters of the lists: of steps, of groups and of trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.inspector.list_view import StepSummary, format_end, format_mismatches
from agentrl_cli.inspector.safe_text import format_number, one_line
from agentrl_cli.inspector.terminal_app.lines_view import Column
from agentrl_cli.inspector.terminal_app.run_reader import GroupRow
from agentrl_cli.inspector.trajectory_query import Found
from agentrl_cli.store.trajectory_summary import TrajectorySummary, TrajectoryTotals

#: Characters of a text that a cell may show.
MAX_CELL = 200


def _of_totals(cell: Callable[[TrajectoryTotals], Any]) -> Callable[[StepSummary], Any]:
    """As ``cell``, for a row whose totals may be unknown."""
    return lambda row: None if row.totals is None else cell(row.totals)


def _cell(cell: Callable[[TrajectoryTotals], str | Text]) -> Callable[[StepSummary], str | Text]:
    return lambda row: "" if row.totals is None else cell(row.totals)


def _format_reward(row: StepSummary) -> str | Text:
    if row.problem is not None:
        return Text("damaged", style="red")
    return "..." if row.totals is None else format_number(row.totals.reward_mean)


def _count_failures(totals: TrajectoryTotals) -> int:
    return totals.num_policy_failures + totals.num_surroundings_failures


def _format_failures(totals: TrajectoryTotals) -> Text:
    return _format_count(_count_failures(totals))


def _format_count(num_failed: int) -> Text:
    return Text(str(num_failed), style="red" if num_failed else "")


def _count_mismatches(counted: TrajectoryTotals | TrajectorySummary) -> int:
    return counted.prefix_mismatches.total.num_turns


STEP_COLUMNS: Sequence[Column[Any]] = (
    Column(
        "step", lambda row: one_line(row.source.name, 40), 10, share=1, is_left=True,
        sort_key=lambda row: (row.source.step, row.source.is_eval),
    ),
    Column("reward", _format_reward, 7, sort_key=_of_totals(lambda t: t.reward_mean)),
    Column(
        "spread", lambda row: format_number(row.deviation), 6, rank=2,
        says_something=lambda row: row.deviation is not None, sort_key=lambda row: row.deviation,
    ),
    Column(
        "failed", _cell(_format_failures), 6, rank=1,
        says_something=_of_totals(_count_failures), sort_key=_of_totals(_count_failures),
    ),
    Column(
        "unscored", _cell(lambda t: str(t.num_unscored)), 8, rank=4,
        says_something=_of_totals(lambda t: t.num_unscored),
    ),
    Column(
        "mismatches", _cell(lambda t: format_mismatches(t.prefix_mismatches)), 12, rank=5,
        says_something=_of_totals(_count_mismatches), sort_key=_of_totals(_count_mismatches),
    ),
    Column("trajectories", _cell(lambda t: f"{t.num_trajectories:,}"), 12, rank=7),
    Column("turns", _cell(lambda t: format_number(t.turns_mean, 1)), 5, rank=6),
    Column(
        "tokens", _cell(lambda t: format_number(t.tokens_mean, 1)), 8, rank=3,
        sort_key=_of_totals(lambda t: t.tokens_mean),
    ),
    Column(
        "alarms", lambda row: Text(" ".join(row.alarms), style="red"), 9, share=2, is_left=True,
        rank=1, says_something=lambda row: bool(row.alarms),
    ),
)  # fmt: skip

STEP_FILTERS: Mapping[str, Callable[[Any], bool]] = {
    "failed": _of_totals(_count_failures),
    "mismatches": _of_totals(_count_mismatches),
    "alarms": lambda row: bool(row.alarms),
    "evaluations": lambda row: row.source.is_eval,
}


_SUMMARY_FILTERS: Mapping[str, Callable[[TrajectorySummary], bool]] = {
    "failed": lambda s: s.failure_boundary is not None,
    "malformed": lambda s: s.num_malformed_calls > 0,
    "cut": lambda s: s.stop_reason is not None or s.is_cut_short,
    "mismatches": lambda s: _count_mismatches(s) > 0,
}


def _any_member(passes: Callable[[TrajectorySummary], bool]) -> Callable[[GroupRow], bool]:
    return lambda group: any(passes(found.summary) for found in group.members)


def _any(passes: Callable[[TrajectorySummary], bool]) -> Callable[[Found], bool]:
    return lambda found: passes(found.summary)


def _count_failed(group: GroupRow) -> int:
    return sum(found.summary.failure_boundary is not None for found in group.members)


def _format_rewards(group: GroupRow) -> str:
    rewards = (found.summary.reward for found in group.members)
    return " ".join("-" if r is None or math.isnan(r) else f"{r:.3g}" for r in rewards)


GROUP_COLUMNS: Sequence[Column[Any]] = (
    Column("group", lambda g: one_line(g.first.group_id, 40), 11, is_left=True, rank=5),
    Column("task", lambda g: one_line(g.first.task_id, 40), 6, is_left=True, rank=4),
    Column("mean", lambda g: format_number(g.mean), 6, sort_key=lambda g: g.mean),
    Column(
        "spread", lambda g: format_number(g.statistics.deviation), 6, rank=2,
        says_something=lambda g: g.statistics.num_scored > 1,
        sort_key=lambda g: g.statistics.deviation if g.statistics.num_scored > 1 else None,
    ),
    Column(
        "failed", lambda g: _format_count(_count_failed(g)), 6, rank=1,
        says_something=_count_failed, sort_key=_count_failed,
    ),
    Column(
        "replaced", lambda g: Text("replaced" * bool(g.first.replaced_by), style="yellow"), 8,
        is_left=True, rank=3, says_something=lambda g: g.first.replaced_by is not None,
    ),
    Column("rewards", _format_rewards, 12, share=2, is_left=True, rank=1),
    Column(
        "question", lambda g: one_line(g.first.question, MAX_CELL), 10, share=4, is_left=True,
        rank=3,
    ),
)  # fmt: skip

GROUP_FILTERS: Mapping[str, Callable[[Any], bool]] = {
    **{name: _any_member(passes) for name, passes in _SUMMARY_FILTERS.items()},
    "with a spread": lambda group: group.statistics.has_signal,
}


def _format_end(found: Found) -> Text:
    end = format_end(found.summary)
    return Text(end.plain.replace("\n", ", "), style=end.style)


def _format_said(found: Found) -> str:
    said = found.summary.final_answer or found.summary.failure_message or ""
    return one_line(said, MAX_CELL)


TRAJECTORY_COLUMNS: Sequence[Column[Any]] = (
    Column("id", lambda f: one_line(f.summary.id, 40), 13, is_left=True, rank=6),
    Column(
        "reward", lambda f: format_number(f.summary.reward), 6,
        sort_key=lambda f: f.summary.reward,
    ),
    Column(
        "turns", lambda f: str(f.summary.num_turns), 5, rank=3,
        sort_key=lambda f: f.summary.num_turns,
    ),
    Column(
        "tokens", lambda f: f"{f.summary.num_completion_tokens:,}", 7, rank=4,
        sort_key=lambda f: f.summary.num_completion_tokens,
    ),
    Column(
        "seconds", lambda f: f"{f.summary.seconds:,.1f}", 7, rank=8,
        sort_key=lambda f: f.summary.seconds,
    ),
    Column(
        "mismatches", lambda f: format_mismatches(f.summary.prefix_mismatches), 10, rank=7,
        says_something=lambda f: _count_mismatches(f.summary),
    ),
    Column(
        "ended", _format_end, 10, share=2, is_left=True, rank=1,
        says_something=lambda f: format_end(f.summary),
    ),
    Column(
        "question", lambda f: one_line(f.summary.question, MAX_CELL), 16, share=3,
        is_left=True, rank=4,
    ),
    Column(
        "expected", lambda f: one_line(f.summary.expected, MAX_CELL), 8, share=2,
        is_left=True, rank=6,
    ),
    Column("said", _format_said, 12, share=3, is_left=True, rank=2),
)  # fmt: skip

TRAJECTORY_FILTERS: Mapping[str, Callable[[Any], bool]] = {
    name: _any(passes) for name, passes in _SUMMARY_FILTERS.items()
}
