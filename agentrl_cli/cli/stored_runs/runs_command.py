"""``agentrl runs``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from agentrl_cli.store.run_outline import RunOutline

_DEFAULT = "runs"
_DAY_SECONDS = 24 * 3600
_BARS = 12
#: What is left out first where there is no room for all columns.
_DROPPED = ("time", "reward", "eval", "active", "last", "steps")
#: Columns of a terminal that names get before others are left out for them.
_NAME_WIDTH = 24
_MIN_NAME_WIDTH = 8
_STYLES = {"running": "green", "damaged": "red", "unknown": "yellow"}


def runs_command(
    directory: Annotated[
        str, typer.Argument(help="Where runs are, or those of one experiment.", metavar="[DIR]")
    ] = _DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
) -> None:
    """List runs, the newest first: are they running, how far, how good."""
    from agentrl_cli.inspector.inspect_run import build_console
    from agentrl_cli.inspector.run_list import format_runs, list_runs

    is_there = directory != _DEFAULT or Path(directory).exists()
    runs = list_runs(directory) if is_there else []
    if as_json:
        typer.echo(format_runs(directory, runs))
    else:
        _print(directory, runs, build_console())


def _print(directory: str, runs: list[RunOutline], console: Console) -> None:
    import shlex

    from agentrl_cli.log import sanitize

    def say(text: str) -> None:
        # A name may hold the end of a line.
        line = sanitize(text).replace("\n", "\\n")
        console.print(line, style="dim", markup=False, soft_wrap=True)

    if not runs:
        say(
            f"no runs in {Path(directory).absolute()}. To start one:  agentrl train --config FILE "
            "(agentrl init writes a first one). To look elsewhere:  agentrl runs DIR"
        )
        return
    console.print(_build_table(runs, console.width))
    for run in runs:
        for problem in run.problems:
            say(problem)
        if run.host is not None:
            elsewhere = (
                f"is running on {run.host}"
                if run.status == "running"
                else f"may be running on {run.host}, where it was started last: it was not ended "
                "there in order, and locks of other machines are not always seen from here"
            )
            say(f"{run.path}: {elsewhere}")
    say(f"the first one:  agentrl inspect-trajectories {shlex.quote(str(runs[0].path))}")


def _build_table(runs: list[RunOutline], width: int) -> Table:
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    rows = [_list_cells(run) for run in runs]
    widths = {name: max(cell_len(row[name]) for row in [*rows, {name: name}]) for name in rows[0]}
    wanted = min(widths["run"], _NAME_WIDTH)
    shown = list(widths)

    def find_room() -> int:
        return width - sum(widths[name] + 1 for name in shown if name != "run")

    for name in _DROPPED:
        if find_room() < wanted:
            shown.remove(name)
    room = max(find_room(), _MIN_NAME_WIDTH)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for name in shown:
        is_number = name in ("steps", "last", "eval", "time")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    for row in rows:
        row["run"] = _cut(row["run"], room)
        style = _STYLES.get(row["status"], "")
        table.add_row(*(Text(row[n], style=style if n == "status" else "") for n in shown))
    return table


def _list_cells(run: RunOutline) -> dict[str, str]:
    from agentrl_cli.cli.display.progress_display import format_duration
    from agentrl_cli.inspector.run_list import find_last_reward, name_run
    from agentrl_cli.inspector.safe_text import format_number, one_line
    from agentrl_cli.sparkline import format_sparkline

    is_trained = run.status != "evaluation"
    total = "?" if run.total_steps is None else run.total_steps
    latest = run.latest_eval
    return {
        "run": one_line(name_run(run), 200),
        "status": run.status,
        "steps": f"{run.step}/{total}" if is_trained else "-",
        "reward": format_sparkline(run.rewards, _BARS),
        "last": format_number(find_last_reward(run)),
        "eval": format_number(None if latest is None else latest.mean_reward),
        "time": format_duration(run.seconds) if run.seconds else "-",
        "active": "-" if run.last_activity is None else _format_age(run.last_activity),
    }


def _format_age(moment: float) -> str:
    import time

    from agentrl_cli.cli.display.progress_display import format_duration
    from agentrl_cli.log import format_count

    # Clocks of other machines may be ahead.
    seconds = max(time.time() - moment, 0.0)
    if seconds >= 2 * _DAY_SECONDS:
        return f"{format_count(seconds // _DAY_SECONDS, 'day')} ago"
    hours = int(seconds // 3600)
    return f"{hours} h ago" if hours else f"{format_duration(seconds)} ago"


def _cut(text: str, room: int) -> str:
    """``text`` without its middle where it has no room: trials differ in their ends."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= room:
        return text
    head, tail = (room - 1) // 2, room - 1 - (room - 1) // 2
    return f"{set_cell_size(text, head)}…{set_cell_size(text[::-1], tail)[::-1]}"
