"""Tables of a run's steps, of a selection's trajectories and of its prefix mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.safe_text import format_number, one_line
from agentrl_cli.inspector.trajectory_query import Found, Source, list_sources
from agentrl_cli.prefix_mismatches import REMEDIES, MismatchSummary
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import read_totals
from agentrl_cli.store.trajectory_summary import TrajectorySummary, TrajectoryTotals

#: Characters of a text that a table's cell may show.
_MAX_CELL = 120
#: Columns of a terminal from which on lists show ids and costs too.
_WIDE = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One stored file of trajectories in numbers, or why it cannot be read."""

    source: Source
    totals: TrajectoryTotals | None = None
    """None: they have not been read yet, or cannot be."""
    alarms: tuple[str, ...] = ()
    """Those that were active in the step."""
    problem: str | None = None
    """Why they cannot be read."""
    deviation: float | None = None
    """Of the rewards; None: no metric has it, or nobody has asked."""

    @property
    def prefix_mismatches(self) -> MismatchSummary:
        """Those of its trajectories."""
        return MismatchSummary() if self.totals is None else self.totals.prefix_mismatches


def summarize_steps(folder: RunFolder) -> list[StepSummary]:
    """Every step and evaluation of a run."""
    summaries = []
    alarms = folder.read_alarms()
    for source in list_sources(folder):
        names = () if source.is_eval else tuple(alarms.get(source.step, ()))
        try:
            totals = read_totals(source.find_file(folder))
            summaries.append(StepSummary(source=source, totals=totals, alarms=names))
        except AgentrlError as error:
            summaries.append(StepSummary(source=source, problem=str(error)))
    return summaries


#: Columns of a step, and what its cells say.
_STEP_COLUMNS: dict[str, Callable[[TrajectoryTotals], str | Text]] = {
    "trajectories": lambda t: str(t.num_trajectories),
    "reward": lambda t: format_number(t.reward_mean),
    "unscored": lambda t: str(t.num_unscored),
    "failed: policy": lambda t: str(t.num_policy_failures),
    "failed: surroundings": lambda t: str(t.num_surroundings_failures),
    "turns": lambda t: format_number(t.turns_mean, 1),
    "tokens": lambda t: format_number(t.tokens_mean, 1),
    "mismatches": lambda t: format_mismatches(t.prefix_mismatches),
    "replaced groups": lambda t: str(t.num_filtered_groups),
}
#: Of these, those that say something only in runs that had any.
_COUNTS_OF_TROUBLE: dict[str, Callable[[TrajectoryTotals], int]] = {
    "unscored": lambda t: t.num_unscored,
    "failed: policy": lambda t: t.num_policy_failures,
    "failed: surroundings": lambda t: t.num_surroundings_failures,
    "mismatches": lambda t: t.prefix_mismatches.total.num_turns,
    "replaced groups": lambda t: t.num_filtered_groups,
}


def build_step_table(summaries: Sequence[StepSummary]) -> Table:
    """One row a step; what went wrong has columns where the run had any of it."""
    table = Table(box=None)
    table.add_column("", overflow="fold")
    all_totals = [s.totals for s in summaries if s.totals is not None]
    shown = {
        name: cell
        for name, cell in _STEP_COLUMNS.items()
        if name not in _COUNTS_OF_TROUBLE or any(map(_COUNTS_OF_TROUBLE[name], all_totals))
    }
    for name in shown:
        table.add_column(name, justify="right", overflow="fold")
    has_alarms = any(s.alarms for s in summaries)
    if has_alarms:
        table.add_column("alarms", overflow="fold")
    for s in summaries:
        if s.totals is None:
            table.add_row(s.source.name, Text("damaged", style="red"))
        else:
            alarms = [Text(" ".join(s.alarms), style="red")] if has_alarms else []
            table.add_row(s.source.name, *(cell(s.totals) for cell in shown.values()), *alarms)
    return table


def build_trajectory_table(found: Sequence[Found], width: int) -> Table:
    """One row a trajectory, numbered from 1; ids and costs where ``width`` columns have room."""
    table = Table(box=None, expand=True, pad_edge=False)
    is_wide = width >= _WIDE
    are_mixed = len({item.source for item in found}) > 1
    table.add_column("#", justify="right", no_wrap=True)
    for name in [*(["id"] if is_wide else []), *(["from"] if are_mixed else [])]:
        table.add_column(name, no_wrap=True)
    costs = ["tokens", "seconds", "mismatches"] if is_wide else []
    for name in ("reward", "turns", *costs):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("ended", overflow="fold", max_width=20)
    # What a terminal of 80 columns leaves is theirs, and more on a wider one.
    for name, ratio in (("question", 3), ("expected", 2), ("said", 3)):
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for number, item in enumerate(found, start=1):
        s = item.summary
        texts = (s.question, s.expected, s.final_answer or s.failure_message or "")
        table.add_row(
            str(number),
            *([Text(s.id)] if is_wide else []),
            *([Text(item.source.name)] if are_mixed else []),
            format_number(s.reward),
            str(s.num_turns),
            *(_list_costs(s) if is_wide else []),
            format_end(s),
            *(Text(one_line(text, _MAX_CELL)) for text in texts),
        )
    return table


def _list_costs(summary: TrajectorySummary) -> list[str | Text]:
    return [
        str(summary.num_completion_tokens),
        f"{summary.seconds:.1f}",
        format_mismatches(summary.prefix_mismatches),
    ]


def format_end(summary: TrajectorySummary) -> Text:
    """A cell of a table: what failed or was cut, what was malformed or replaced; mostly nothing."""
    parts = []
    if summary.failure_boundary is not None:
        parts.append(f"failed: {summary.failure_boundary.value}")
    if summary.stop_reason is not None:
        parts.append(f"cut: {summary.stop_reason.value}")
    elif summary.is_cut_short:
        parts.append("cut: reply")
    if summary.num_malformed_calls:
        parts.append("malformed call")
    if summary.replaced_by is not None:
        parts.append("replaced")
    return Text("\n".join(parts), style="red" if summary.failure_boundary else "yellow")


def format_alarms(alarms: Mapping[int, Sequence[str]]) -> list[str]:
    """``alarm truncated active in steps 3-7, 12``: one line an alarm, the first to trigger first.

    Args:
        alarms: the names of those that were active in each step.
    """
    steps: dict[str, list[int]] = {}
    for step, names in sorted(alarms.items()):
        for name in names:
            steps.setdefault(name, []).append(step)
    return [
        f"alarm {name} active in {'step' if len(found) == 1 else 'steps'} {format_ranges(found)}"
        for name, found in steps.items()
    ]


def format_ranges(numbers: Sequence[int]) -> str:
    """``3-7, 12`` for ascending numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def build_mismatch_table(summary: MismatchSummary, title: str) -> Table | None:
    """One row a cause: turns, share, tokens lost and the remedy; None without a mismatch."""
    if not summary.by_cause:
        return None
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    for name in ("prefix mismatches", "number", "share", "re-prefilled", "dropped"):
        table.add_column(
            name, justify="left" if name == "prefix mismatches" else "right", no_wrap=True
        )
    table.add_column("what to do", overflow="fold")
    for cause, totals in summary.by_cause.items():
        table.add_row(
            Text(cause.value, style="yellow"),
            f"{totals.num_turns:,}",
            format_share(totals.num_turns, summary.num_replaying_turns),
            f"{totals.num_reprefilled_tokens:,}",
            f"{totals.num_dropped_tokens:,}",
            Text(REMEDIES[cause]),
        )
    return table


def format_share(num_mismatches: int, num_replaying: int) -> str:
    """Mismatches as a share of the turns that continue an earlier one; ``-`` where none does."""
    return f"{num_mismatches / num_replaying:.0%}" if num_replaying else "-"


def format_mismatches(summary: MismatchSummary) -> Text:
    """A cell of a table: nothing, or the number of mismatches and their share."""
    num_mismatches = summary.total.num_turns
    if not num_mismatches:
        return Text("0")
    share = format_share(num_mismatches, summary.num_replaying_turns)
    return Text(f"{num_mismatches} ({share})", style="yellow")


def describe_mismatches(summary: MismatchSummary) -> dict[str, Any]:
    """The summary for machines, with each cause's remedy."""
    data = summary.to_dict()
    by_cause: Mapping[Any, dict[str, Any]] = data["by_cause"]
    for cause in summary.by_cause:
        by_cause[cause.value]["remedy"] = REMEDIES[cause]
    return data | {"mismatch_fraction": summary.mismatch_fraction}
