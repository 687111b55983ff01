"""An evaluation's report, and the change between two, as tables."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_cli.breaks import REMEDIES, format_break_totals

if TYPE_CHECKING:
    from agentrl_cli.evaluate.report import Comparison, EvalReport, Lengths

#: Columns of a pipe or a file, which have no width of their own.
_PIPE_WIDTH = 120


def build_console() -> Console:
    """A console on stdout that does not cut lines short in a pipe."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def print_report(report: EvalReport, *, title: str) -> None:
    """Prints one report."""
    build_console().print(build_report_table(report, title))


def build_report_table(report: EvalReport, title: str) -> Table:
    """Name and value of everything that the report holds."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    table.add_column("", style="dim")
    table.add_column("")
    for name, value in _list_rows(report).items():
        table.add_row(name, Text(value))
    for cause in report.breaks.by_cause:
        table.add_row(f"against {cause.value}", Text(REMEDIES[cause]))
    return table


def build_comparison_table(before: EvalReport, after: EvalReport) -> Table:
    """Before and after side by side."""
    table = Table(box=None)
    table.add_column("", style="dim")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    rows_before, rows_after = _list_rows(before), _list_rows(after)
    for name in dict.fromkeys([*rows_before, *rows_after]):
        table.add_row(name, Text(rows_before.get(name, "-")), Text(rows_after.get(name, "-")))
    return table


def format_comparison(comparison: Comparison) -> str:
    """One sentence on the change of the mean reward."""
    interval = ""
    if comparison.interval is not None:
        low, high = comparison.interval
        interval = f" (95 % interval {low:+.3f} to {high:+.3f}, paired by task)"
    return (
        f"mean reward {comparison.before:.3f} -> {comparison.after:.3f}: "
        f"{comparison.difference:+.3f}{interval}; of {comparison.num_tasks} tasks "
        f"{comparison.num_improved} improved, {comparison.num_worse} got worse"
    )


def _list_rows(report: EvalReport) -> dict[str, str]:
    mean = "nothing was scored" if report.mean_reward is None else f"{report.mean_reward:.3f}"
    if report.interval is not None:
        low, high = report.interval
        mean += f"  (95 %: {low:.3f} to {high:.3f})"
    rows = {"mean reward": mean}
    rows |= {f"pass@{k}": f"{value:.3f}" for k, value in report.pass_at_k.items()}
    rows["tasks / trajectories"] = f"{report.num_tasks} / {report.num_trajectories}"
    rows["turns"] = _format_lengths(report.turns)
    rows["tool calls"] = _format_lengths(report.tool_calls)
    rows["completion tokens"] = _format_lengths(report.completion_tokens)
    if report.num_cut_short:
        rows["cut short by max_tokens"] = str(report.num_cut_short)
    if report.num_unscored:
        rows["unscored"] = str(report.num_unscored)
    rows["failures"] = _format_failures(report.failures)
    for cause, totals in report.breaks.by_cause.items():
        rows[f"broken turns: {cause.value}"] = format_break_totals(totals)
    return rows


def _format_failures(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{boundary} {count}" for boundary, count in failures.items()) or "none"


def _format_lengths(lengths: Lengths | None) -> str:
    if lengths is None:
        return "-"
    return f"{lengths.mean:.1f}  (median {lengths.median:.0f}, most {lengths.largest:.0f})"
