"""What ``agentrl train`` prints at its end: before and after, and what to type next."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl_cli.cli.report_table import (
    build_comparison_table,
    build_console,
    build_report_table,
    format_comparison,
)
from agentrl_cli.cli.sparkline import format_sparkline

if TYPE_CHECKING:
    from agentrl_cli.evaluate.report import EvalReport
    from agentrl_cli.records import Trajectory
    from agentrl_cli.store.run_folder import RunFolder


def print_summary(
    folder: RunFolder,
    *,
    config_path: Path,
    overrides: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Prints the change that the run made, from what is stored of it."""
    console = console or build_console()
    _print_rewards(folder, console)
    _print_alarms(folder, console)
    steps = folder.eval_steps()
    if steps:
        before, after = _read_eval(folder, steps[0]), _read_eval(folder, steps[-1])
        _print_evals(steps, before[1], after[1], console)
        if len(steps) > 1:
            _print_pair(before[0], after[0], console)
    console.print()
    for line in _list_next_commands(folder, config_path, overrides):
        console.print(line, markup=False, soft_wrap=True)


def _print_rewards(folder: RunFolder, console: Console) -> None:
    metrics = folder.read_metrics()
    rewards = [m.get("reward_mean", math.nan) for m in metrics]
    line = format_sparkline(rewards, width=60)
    if line:
        known = [r for r in rewards if math.isfinite(r)]
        console.print(
            f"\nreward of {len(rewards)} steps  {known[0]:.3f} {line} {known[-1]:.3f}",
            markup=False,
        )


def _print_alarms(folder: RunFolder, console: Console) -> None:
    from agentrl_cli.inspector.alarms_view import format_alarms

    lines = format_alarms(folder.read_alarms())
    for line in lines:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    if lines:
        log = shlex.quote(str(folder.log_path("trainer")))
        console.print(f"(what was seen, and what to type: {log})", markup=False, soft_wrap=True)


def _read_eval(folder: RunFolder, step: int) -> tuple[list[Trajectory], EvalReport]:
    """An evaluation; its report is made anew where it is of another version."""
    from agentrl_cli.evaluate.report import EvalReport, build_report

    trajectories, data = folder.read_eval(step)
    try:
        return trajectories, EvalReport.from_dict(data)
    except (KeyError, TypeError, ValueError):
        return trajectories, build_report(trajectories)


def _print_evals(
    steps: Sequence[int], before: EvalReport, after: EvalReport, console: Console
) -> None:
    from agentrl_cli.evaluate.report import compare_reports

    console.print()
    if len(steps) == 1:
        console.print(build_report_table(before, f"evaluation after step {steps[0]}"))
        return
    console.print(build_comparison_table(before, after))
    comparison = compare_reports(before, after)
    if comparison is not None:
        console.print(format_comparison(comparison), markup=False)


def _print_pair(
    before: Sequence[Trajectory], after: Sequence[Trajectory], console: Console
) -> None:
    from agentrl_cli.inspector.tree_view import build_tree

    pair = find_telling_pair(before, after)
    if pair is not None:
        for trajectory, title in zip(pair, ("before", "after"), strict=True):
            console.print()
            console.print(build_tree(trajectory, title))


def find_telling_pair(
    before: Sequence[Trajectory], after: Sequence[Trajectory]
) -> tuple[Trajectory, Trajectory] | None:
    """Two attempts at one task, before and after: of those that gained most, the shortest.

    None where no task was attempted both times, with a reward.
    """
    earlier: dict[str, Trajectory] = {}
    for trajectory in before:
        if _reward(trajectory) is not None:
            earlier.setdefault(trajectory.task_id, trajectory)
    pairs = [
        (earlier[t.task_id], t) for t in after if t.task_id in earlier and _reward(t) is not None
    ]
    return min(pairs, key=_rank_pair, default=None)


def _rank_pair(pair: tuple[Trajectory, Trajectory]) -> tuple[float, int]:
    before, after = pair
    gain = (_reward(after) or 0.0) - (_reward(before) or 0.0)
    return -round(gain, 9), before.num_completion_tokens + after.num_completion_tokens


def _reward(trajectory: Trajectory) -> float | None:
    reward = trajectory.reward
    return None if reward is None or math.isnan(reward) else reward


def _list_next_commands(
    folder: RunFolder, config_path: Path, overrides: Sequence[str]
) -> list[str]:
    run = shlex.quote(str(folder.path))
    lines = []
    if folder.trajectory_steps():
        lines.append(f"look at what it did:  agentrl inspect-trajectories {run}")
    latest = folder.latest_checkpoint()
    if latest is not None:
        checkpoint = shlex.quote(str(latest[1]))
        typed = "".join(f" {shlex.quote(text)}" for text in overrides)
        lines.append(
            f"measure it again:     agentrl eval --config {shlex.quote(str(config_path))} "
            f"--checkpoint {checkpoint}{typed}"
        )
        lines.append(f"take the model out:   agentrl export {run} --to DIR")
    return lines
