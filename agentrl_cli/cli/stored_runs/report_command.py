"""``agentrl report``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.errors import UserInputError

if TYPE_CHECKING:
    from agentrl_cli.inspector.report.report_page import WrittenReport
    from agentrl_cli.inspector.trajectory_view import Spell
    from agentrl_cli.store.run_folder import RunFolder

_POLL_SECONDS = 0.1
_NAME = "report.html"


def report_command(
    run: Annotated[str, typer.Argument(help="A run folder, or its URL.", metavar="RUN")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="The file to write [default: RUN/report.html; ./report.html of a URL].",
            metavar="FILE",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="A model folder whose tokenizer spells the tokens [default: that of the last "
            "checkpoint].",
            metavar="DIR",
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Follow a run that continues; Ctrl-C ends it.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=1024, max=65535, help="Port of --serve; any free one otherwise.", metavar="N"
        ),
    ] = None,
) -> None:
    """Make a page about a run for a browser: curves, trajectories, groups, tokens, evaluations."""
    if serve and to is not None:
        raise UserInputError("--serve writes no file. Leave out --html, or --serve")
    if port is not None and not serve:
        raise UserInputError("--port is of --serve. Add --serve")
    check_page(to)

    from agentrl_cli.inspector.trajectory_view import load_spell
    from agentrl_cli.store.layout import is_url
    from agentrl_cli.store.run_folder import RunFolder

    folder = RunFolder.open(run)
    spell = load_spell(folder, tokenizer)
    if serve:
        _serve(folder, spell, port)
        return
    default = Path(_NAME) if is_url(folder.location) else folder.path / _NAME
    _say_what_was_written(_write(folder, to or default, spell))


def check_page(path: Path | None, name: str = _NAME) -> None:
    """Refuses what ``--html`` cannot name; ``name`` is what a page in a folder may be called."""
    if path is not None and (path.is_dir() or path.suffix.lower() not in (".html", ".htm")):
        problem = "is a folder" if path.is_dir() else "does not end in .html"
        hint = path / name if path.is_dir() else path.with_name(f"{path.name}.html")
        raise UserInputError(f"--html {path}: {problem}. Type --html {hint}")


def _write(folder: RunFolder, path: Path, spell: Spell | None) -> WrittenReport:
    from rich.console import Console
    from rich.progress import Progress

    from agentrl_cli.inspector.report.report_page import write_report

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("trajectories", total=None)
        return write_report(
            folder,
            path,
            spell,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _say_what_was_written(written: WrittenReport) -> None:
    from agentrl_cli.log import format_count

    count = format_count(written.num_trajectories, "trajectory", "trajectories")
    typer.echo(f"{written.path}: {count}, {written.num_bytes / 1e6:.1f} MB")
    say_what_belongs_to(written)


def say_what_belongs_to(written: WrittenReport, *, err: bool = False) -> None:
    """Prints what could not be read for a page, and which folder it needs beside it."""
    from agentrl_cli.log import format_count, sanitize

    for problem in written.problems:
        typer.echo(sanitize(problem), err=True)
    if written.folder is not None:
        typer.echo(
            f"the details of its trajectories are in {written.folder} "
            f"({format_count(written.num_files, 'file')}): keep that folder beside the page",
            err=err,
        )


def _serve(folder: RunFolder, spell: Spell | None, port: int | None) -> None:
    from agentrl_cli.cli.command_exit import stop_on_signals
    from agentrl_cli.errors import RunError
    from agentrl_cli.inspector.report.report_server import serve_report

    with (
        serve_report(folder, spell, port) as served,
        stop_on_signals(lambda _: typer.echo("stopping")) as stop,
    ):
        typer.echo(f"serving {folder.location} at {served.url} (this machine alone)")
        while not stop.is_set():
            if not served.is_running():
                raise RunError("the server of the page has ended; its message is above")
            time.sleep(_POLL_SECONDS)
    typer.echo("stopped serving")
