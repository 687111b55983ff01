"""``agentrl export-trajectories``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentrl_cli.cli.stored_runs.inspect_command import EvalsOption
from agentrl_cli.errors import UserInputError
from agentrl_cli.log import format_count

if TYPE_CHECKING:
    from agentrl_cli.inspector.exports.export_selection import ExportSelection

_FORMATS = (
    "sft: conversations that agentrl sft reads; jsonl: everything, for programs of your own; "
    "inspect: logs that inspect view opens; atif: documents that Harbor reads."
)
_FOLDERS = ("inspect", "atif")
_WITH_TOKENS = ("jsonl", "atif")


def export_trajectories_command(
    run: Annotated[str, typer.Argument(help="A run folder, or its URL.", metavar="RUN")],
    to: Annotated[
        Path,
        typer.Option(
            "--to",
            help="The .jsonl file to write; of the formats inspect and atif, a folder.",
            metavar="PATH",
        ),
    ],
    format_: Annotated[
        Literal["sft", "jsonl", "inspect", "atif"], typer.Option("--format", help=_FORMATS)
    ] = "sft",
    step: Annotated[
        str | None,
        typer.Option(
            "--step", "--steps", help="Steps: 12, 3-7, 1,4,9, last or all.", metavar="STEPS"
        ),
    ] = None,
    evals: EvalsOption = None,
    min_reward: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="Trajectories of one task, the best first.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="jsonl, atif: token ids, logprobs and versions too.")
    ] = False,
) -> None:
    """Write trajectories of a run for other programs, or to train on the best of them."""
    _check_options(to, format_, tokens=tokens)
    from agentrl_cli.inspector.exports.export_selection import ExportSelection

    selection = ExportSelection(
        steps=step, evals=evals, min_reward=min_reward, max_per_task=max_per_task
    )
    if format_ == "sft":
        _export_sft(run, to, selection)
        return
    num_written = _export(run, to, format_, selection, tokens=tokens)
    typer.echo(f"{to}: {format_count(num_written, 'trajectory', 'trajectories')}")
    if format_ == "inspect":
        typer.echo(f"to look at them, type: inspect view --log-dir {shlex.quote(str(to))}")


def _export_sft(run: str, to: Path, selection: ExportSelection) -> None:
    from agentrl_cli.inspector.exports.conversation_export import export_conversations

    done = export_conversations(run, to, selection)
    typer.echo(
        f"{to}: {format_count(done.num_rows, 'conversation')} of "
        f"{format_count(done.num_tasks, 'task')}, from "
        f"{format_count(done.num_trajectories, 'trajectory', 'trajectories')}"
    )
    path = shlex.quote(str(to))
    typer.echo(f"to train on them, name it in a configuration of agentrl sft: dataset.path={path}")


def _export(run: str, to: Path, format_: str, selection: ExportSelection, *, tokens: bool) -> int:
    """Writes the trajectories, and gives their number."""
    if format_ == "jsonl":
        from agentrl_cli.inspector.exports.jsonl_export import export_jsonl

        return export_jsonl(run, to, selection, tokens=tokens)
    if format_ == "inspect":
        from agentrl_cli.inspector.exports.inspect_logs import export_inspect

        return export_inspect(run, to, selection)
    from agentrl_cli.inspector.exports.atif_export import export_atif

    return export_atif(run, to, selection, tokens=tokens)


def _check_options(to: Path, format_: str, *, tokens: bool) -> None:
    """Refuses what does not fit the format.

    Raises:
        UserInputError: with what to type instead.
    """
    if format_ in _FOLDERS and to.exists() and not to.is_dir():
        raise UserInputError(
            f"--to {to} is a file, and --format {format_} writes a folder. Name a folder, as in "
            f"{to.with_suffix('')}-{format_}"
        )
    if format_ not in _FOLDERS and to.is_dir():
        raise UserInputError(f"--to {to} is a folder. Name a file in it, as in {to / 'best.jsonl'}")
    if tokens and format_ not in _WITH_TOKENS:
        raise UserInputError(
            f"--tokens: the format {format_} has no place for token ids. Allowed with --format "
            "jsonl and atif; leave it out, or type --format jsonl"
        )
