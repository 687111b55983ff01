"""What commands print at their end: an evaluation's report, or what a training run has changed and
what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_cli.log import format_count, format_failures
from agentrl_cli.prefix_mismatches import REMEDIES, format_mismatch_totals
from agentrl_cli.sparkline import format_sparkline

if TYPE_CHECKING:
    from agentrl_cli.evaluate.comparison import PairedComparison
    from agentrl_cli.evaluate.eval_report import EvalReport, Lengths
    from agentrl_cli.records import Trajectory
    from agentrl_cli.store.run_folder import RunFolder


def build_report_table(report: EvalReport) -> Table:
    """Name and value of everything that the report holds."""
    table = Table(box=None)
    table.add_column("", style="dim")
    table.add_column("")
    for name, value in _list_rows(report).items():
        table.add_row(name, Text(value))
    for cause in report.prefix_mismatches.by_cause:
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


def format_mean_reward(report: EvalReport) -> str:
    """The mean reward with its interval."""
    mean = "nothing was scored" if report.mean_reward is None else f"{report.mean_reward:.3f}"
    if report.interval is not None:
        low, high = report.interval
        mean += f"  ({low:.3f} to {high:.3f})"
    return mean


def _list_rows(report: EvalReport) -> dict[str, str]:
    mean = format_mean_reward(report)
    mean += f"  {format_failures(report.num_policy_failures, report.num_surroundings_failures)}"
    rows = {"mean reward (95 %)" if report.interval else "mean reward": mean.strip()}
    rows |= {f"reward part {name}": f"{v:.3f}" for name, v in report.reward_parts.items()}
    rows |= {f"pass@{k}": f"{value:.3f}" for k, value in report.pass_at_k.items()}
    if report.num_trajectories > report.num_tasks:
        num_never = report.num_tasks - report.num_always_passed - report.num_sometimes_passed
        rows["tasks passed"] = (
            f"always {report.num_always_passed}, sometimes {report.num_sometimes_passed}, "
            f"never {num_never}"
        )
    rows["tasks / trajectories"] = f"{report.num_tasks} / {report.num_trajectories}"
    rows["turns"] = _format_lengths(report.turns)
    rows["tool calls"] = _format_lengths(report.tool_calls)
    rows["completion tokens"] = _format_lengths(report.completion_tokens)
    if report.num_cut_short:
        rows["cut short by max_tokens"] = str(report.num_cut_short)
    if report.num_unscored:
        rows["unscored"] = str(report.num_unscored)
    failures = [f"{boundary} {count}" for boundary, count in report.failures.items()]
    rows["failures"] = ", ".join(failures) or "none"
    for cause, totals in report.prefix_mismatches.by_cause.items():
        rows[f"prefix mismatches: {cause.value}"] = format_mismatch_totals(totals)
    return rows


def _format_lengths(lengths: Lengths | None) -> str:
    if lengths is None:
        return "-"
    return f"{lengths.mean:.1f}  (median {lengths.median:g}, max {lengths.largest:.0f})"


def print_summary(
    folder: RunFolder,
    *,
    config_path: Path,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Prints the change that the run made, from what is stored of it."""
    from agentrl_cli.inspector.inspect_run import build_console

    console = console or build_console()
    _print_rewards(folder, console)
    _print_alarms(folder, console)
    _print_evals(folder, console)
    _print_time(folder, console)
    console.print()
    for line in _list_next_commands(folder, config_path, overrides):
        console.print(line, markup=False, soft_wrap=True)


def _print_rewards(folder: RunFolder, console: Console) -> None:
    metrics = folder.read_metrics()
    rewards = [m.get("reward_mean", math.nan) for m in metrics]
    line = format_sparkline(rewards, width=60)
    if line:
        known = [r for r in rewards if math.isfinite(r)]
        steps = format_count(len(rewards), "step")
        console.print(f"\nreward of {steps}  {known[0]:.3f} {line} {known[-1]:.3f}", markup=False)


def _print_alarms(folder: RunFolder, console: Console) -> None:
    from agentrl_cli.inspector.list_view import format_alarms
    from agentrl_cli.store.layout import describe

    lines = format_alarms(folder.read_alarms())
    for line in lines:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    if lines:
        log = shlex.quote(describe(folder.log_path("trainer")))
        console.print(f"(what was seen, and what to type: {log})", markup=False, soft_wrap=True)


def read_evaluation(
    folder: RunFolder, step: int, label: str | None = None
) -> tuple[list[Trajectory], EvalReport]:
    """An evaluation; its report is rebuilt where another version wrote it."""
    from agentrl_cli.evaluate.eval_report import EvalReport, build_report

    trajectories, data = folder.read_eval(step, label=label)
    try:
        return trajectories, EvalReport.from_dict(data)
    except ValueError:
        return trajectories, build_report(trajectories)


def _print_evals(folder: RunFolder, console: Console) -> None:
    """The first and the last evaluation, and a task in which they differ."""
    from agentrl_cli.evaluate.comparison import compare_tasks, measure_tasks
    from agentrl_cli.inspector.trajectory_view import build_tree

    steps = folder.eval_steps()
    if not steps:
        return
    before, report_before = read_evaluation(folder, steps[0])
    console.print()
    if len(steps) == 1:
        console.print(Text(f"evaluation after step {steps[0]}", style="bold"))
        console.print(build_report_table(report_before))
        return
    after, report_after = read_evaluation(folder, steps[-1])
    console.print(build_comparison_table(report_before, report_after))
    comparison = compare_tasks(measure_tasks(before), measure_tasks(after))
    if comparison.num_tasks:
        console.print(format_comparison(comparison), markup=False)
    for trajectory, title in zip(
        find_telling_pair(before, after), ("before", "after"), strict=False
    ):
        console.print()
        console.print(build_tree(trajectory, title))


def _print_time(folder: RunFolder, console: Console) -> None:
    from agentrl_cli.train.monitor.step_clock import describe_time

    lines = describe_time(folder.read_metrics())
    if lines:
        console.print()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def format_comparison(comparison: PairedComparison) -> str:
    """One sentence on the change of the mean reward."""
    before, difference = comparison.before or 0.0, comparison.difference or 0.0
    interval = ""
    if comparison.interval is not None:
        low, high = comparison.interval
        interval = f" (95 % interval {low:+.3f} to {high:+.3f}, paired by task)"
    return (
        f"mean reward {before:.3f} -> {before + difference:.3f}: {difference:+.3f}{interval}; of "
        f"{format_count(comparison.num_tasks, 'task')} {comparison.num_improved} improved, "
        f"{comparison.num_worse} got worse"
    )


def find_telling_pair(
    before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> Sequence[Trajectory]:
    """A trajectory of the same task before and after: of those that gained most, the shortest.

    None at all where no task has a reward both times.
    """
    earlier: dict[str, Trajectory] = {}
    for trajectory in before:
        if trajectory.known_reward is not None:
            earlier.setdefault(trajectory.task_id, trajectory)
    later = [t for t in after if t.task_id in earlier and t.known_reward is not None]
    pairs = [(earlier[t.task_id], t) for t in later]
    return min(pairs, key=_rank_pair, default=())


def _rank_pair(pair: tuple[Trajectory, Trajectory]) -> tuple[float, int]:
    before, after = pair
    gain = (after.reward or 0.0) - (before.reward or 0.0)
    return -round(gain, 9), before.num_completion_tokens + after.num_completion_tokens


def _list_next_commands(
    folder: RunFolder, config_path: Path, overrides: Sequence[str]
) -> list[str]:
    from agentrl_cli.store.layout import describe

    run = shlex.quote(folder.location)
    lines = []
    if folder.trajectory_steps():
        lines.append(f"look at what it did:  agentrl inspect-trajectories {run}")
        lines.append(f"see it as a page:     agentrl report {run}")
    latest = folder.latest_checkpoint()
    if latest is not None:
        checkpoint = shlex.quote(describe(latest[1]))
        typed = "".join(f" {shlex.quote(text)}" for text in overrides)
        lines.append(
            f"measure it again:     agentrl eval --config {shlex.quote(str(config_path))} "
            f"--checkpoint {checkpoint}{typed}"
        )
        lines.append(f"export the model:     agentrl export {run} --to DIR")
    return lines
