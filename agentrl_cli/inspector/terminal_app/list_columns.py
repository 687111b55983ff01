"""The columns and filters of the lists: of steps, of groups and of trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.inspector.list_view import format_end, format_mismatches
from agentrl_cli.inspector.safe_text import format_number, one_line
from agentrl_cli.inspector.terminal_app.lines_view import Column
from agentrl_cli.inspector.terminal_app.run_reader import GroupRow, StepRow
from agentrl_cli.inspector.trajectory_query import Found
from agentrl_cli.store.trajectory_summary import TrajectorySummary, TrajectoryTotals

#: Characters of a text that a cell may show.
MAX_CELL = 200


def _of_totals(cell: Callable[[TrajectoryTotals], Any]) -> Callable[[StepRow], Any]:
    """As ``cell``, for a row whose totals may be unknown."""
    return lambda row: None if row.totals is None else cell(row.totals)


def _cell(cell: Callable[[TrajectoryTotals], str | Text]) -> Callable[[StepRow], str | Text]:
    return lambda row: "" if row.totals is None else cell(row.totals)


def _format_reward(row: StepRow) -> str | Text:
    if row.problem is not None:
        return Text("damaged", style="red")
    return "..." if row.totals is None else format_number(row.totals.reward_mean)


def _count_failures(totals: TrajectoryTotals) -> int:
    return totals.num_policy_failures + totals.num_surroundings_failures


def _format_failures(totals: TrajectoryTotals) -> Text:
    return Text(str(_count_failures(totals)), style="red" if _count_failures(totals) else "")


STEP_COLUMNS: Sequence[Column[Any]] = (
    Column(
        title="step",
        cell=lambda row: one_line(row.source.name, 40),
        width=10,
        share=1,
        is_left=True,
        sort_key=lambda row: (row.source.step, row.source.is_eval),
    ),
    Column(
        title="reward",
        cell=_format_reward,
        width=7,
        sort_key=_of_totals(lambda t: t.reward_mean),
    ),
    Column(
        title="spread",
        cell=lambda row: format_number(row.deviation),
        width=6,
        rank=2,
        says_something=lambda row: row.deviation is not None,
        sort_key=lambda row: row.deviation,
    ),
    Column(
        title="failed",
        cell=_cell(_format_failures),
        width=6,
        rank=1,
        says_something=_of_totals(_count_failures),
        sort_key=_of_totals(_count_failures),
    ),
    Column(
        title="unscored",
        cell=_cell(lambda t: str(t.num_unscored)),
        width=8,
        rank=4,
        says_something=_of_totals(lambda t: t.num_unscored),
    ),
    Column(
        title="mismatches",
        cell=_cell(lambda t: format_mismatches(t.prefix_mismatches)),
        width=12,
        rank=5,
        says_something=_of_totals(lambda t: t.prefix_mismatches.total.num_turns),
        sort_key=_of_totals(lambda t: t.prefix_mismatches.total.num_turns),
    ),
    Column(
        title="trajectories",
        cell=_cell(lambda t: f"{t.num_trajectories:,}"),
        width=12,
        rank=7,
    ),
    Column(title="turns", cell=_cell(lambda t: format_number(t.turns_mean, 1)), width=5, rank=6),
    Column(
        title="tokens",
        cell=_cell(lambda t: format_number(t.tokens_mean, 1)),
        width=8,
        rank=3,
        sort_key=_of_totals(lambda t: t.tokens_mean),
    ),
    Column(
        title="alarms",
        cell=lambda row: Text(" ".join(row.alarms), style="red"),
        width=9,
        share=2,
        is_left=True,
        rank=1,
        says_something=lambda row: bool(row.alarms),
    ),
)

STEP_FILTERS: Mapping[str, Callable[[Any], bool]] = {
    "failed": lambda row: row.totals is not None and _count_failures(row.totals) > 0,
    "mismatches": lambda row: (
        row.totals is not None and row.totals.prefix_mismatches.total.num_turns > 0
    ),
    "alarms": lambda row: bool(row.alarms),
    "evaluations": lambda row: row.source.is_eval,
}


_SUMMARY_FILTERS: Mapping[str, Callable[[TrajectorySummary], bool]] = {
    "failed": lambda s: s.failure_boundary is not None,
    "malformed": lambda s: s.num_malformed_calls > 0,
    "cut": lambda s: s.stop_reason is not None or s.is_cut_short,
    "mismatches": lambda s: s.prefix_mismatches.total.num_turns > 0,
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
    Column(
        title="group",
        cell=lambda g: one_line(g.first.summary.group_id, 40),
        width=11,
        is_left=True,
        rank=5,
    ),
    Column(
        title="task",
        cell=lambda g: one_line(g.first.summary.task_id, 40),
        width=6,
        is_left=True,
        rank=4,
    ),
    Column(
        title="mean",
        cell=lambda g: format_number(g.statistics.mean if g.statistics.num_scored else None),
        width=6,
        sort_key=lambda g: g.statistics.mean if g.statistics.num_scored else None,
    ),
    Column(
        title="spread",
        cell=lambda g: format_number(g.statistics.deviation),
        width=6,
        rank=2,
        says_something=lambda g: g.statistics.num_scored > 1,
        sort_key=lambda g: g.statistics.deviation if g.statistics.num_scored > 1 else None,
    ),
    Column(
        title="failed",
        cell=lambda g: Text(str(_count_failed(g)), style="red" if _count_failed(g) else ""),
        width=6,
        rank=1,
        says_something=lambda g: _count_failed(g) > 0,
        sort_key=_count_failed,
    ),
    Column(
        title="replaced",
        cell=lambda g: Text("replaced" * bool(g.first.summary.replaced_by), style="yellow"),
        width=8,
        is_left=True,
        rank=3,
        says_something=lambda g: g.first.summary.replaced_by is not None,
    ),
    Column(title="rewards", cell=_format_rewards, width=12, share=2, is_left=True, rank=1),
    Column(
        title="question",
        cell=lambda g: one_line(g.first.summary.question, MAX_CELL),
        width=10,
        share=4,
        is_left=True,
        rank=3,
    ),
)

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
    Column(
        title="id",
        cell=lambda f: one_line(f.summary.id, 40),
        width=13,
        is_left=True,
        rank=6,
    ),
    Column(
        title="reward",
        cell=lambda f: format_number(f.summary.reward),
        width=6,
        sort_key=lambda f: f.summary.reward,
    ),
    Column(
        title="turns",
        cell=lambda f: str(f.summary.num_turns),
        width=5,
        rank=3,
        sort_key=lambda f: f.summary.num_turns,
    ),
    Column(
        title="tokens",
        cell=lambda f: f"{f.summary.num_completion_tokens:,}",
        width=7,
        rank=4,
        sort_key=lambda f: f.summary.num_completion_tokens,
    ),
    Column(
        title="seconds",
        cell=lambda f: f"{f.summary.seconds:,.1f}",
        width=7,
        rank=8,
        sort_key=lambda f: f.summary.seconds,
    ),
    Column(
        title="mismatches",
        cell=lambda f: format_mismatches(f.summary.prefix_mismatches),
        width=10,
        rank=7,
        says_something=lambda f: f.summary.prefix_mismatches.total.num_turns > 0,
    ),
    Column(
        title="ended",
        cell=_format_end,
        width=10,
        share=2,
        is_left=True,
        rank=1,
        says_something=lambda f: bool(format_end(f.summary)),
    ),
    Column(
        title="question",
        cell=lambda f: one_line(f.summary.question, MAX_CELL),
        width=16,
        share=3,
        is_left=True,
        rank=4,
    ),
    Column(
        title="expected",
        cell=lambda f: one_line(f.summary.expected, MAX_CELL),
        width=8,
        share=2,
        is_left=True,
        rank=6,
    ),
    Column(title="said", cell=_format_said, width=12, share=3, is_left=True, rank=2),
)

TRAJECTORY_FILTERS: Mapping[str, Callable[[Any], bool]] = {
    name: _any(passes) for name, passes in _SUMMARY_FILTERS.items()
}
