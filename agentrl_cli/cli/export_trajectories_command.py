"""``agentrl export-trajectories``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl_cli.cli.inspect_command import EvalsOption
from agentrl_cli.errors import UserInputError


def export_trajectories_command(
    run: Annotated[str, typer.Argument(help="A run folder, or its URL.", metavar="RUN")],
    to: Annotated[Path, typer.Option("--to", help="The .jsonl file to write.", metavar="FILE")],
    format_: Annotated[
        Literal["sft"], typer.Option("--format", help="sft: conversations that agentrl sft reads.")
    ] = "sft",
    step: Annotated[
        str | None, typer.Option(help="Steps: 12, 3-7, 1,4,9, last or all.", metavar="STEPS")
    ] = None,
    evals: EvalsOption = None,
    min_reward: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    max_per_task: Annotated[
        int | None, typer.Option(min=1, help="Trajectories of one task, the best first.")
    ] = None,
) -> None:
    """Write the conversations of a run to a file, for supervised training on the best of them."""
    if to.is_dir():
        raise UserInputError(f"--to {to} is a folder. Name a file in it, as in {to / 'best.jsonl'}")

    from agentrl_cli.inspector.conversation_export import export_conversations

    del format_  # There is one.
    done = export_conversations(
        run, to, steps=step, evals=evals, min_reward=min_reward, max_per_task=max_per_task
    )
    typer.echo(
        f"{to}: {done.num_rows} conversations of {done.num_tasks} tasks, from "
        f"{done.num_trajectories} trajectories"
    )
    typer.echo(f"to train on them, name it in a configuration of agentrl sft: dataset.path={to}")
