"""``agentrl export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from agentrl_cli.errors import UserInputError


def export_command(
    run: Annotated[
        str, typer.Argument(help="A run folder (or URL), or one of its checkpoints.", metavar="RUN")
    ],
    to: Annotated[Path, typer.Option("--to", help="The folder to create.", metavar="DIR")],
    step: Annotated[
        int | None, typer.Option(help="The checkpoint of this step.", metavar="N")
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The checkpoint with the best evaluation.")
    ] = False,
    last: Annotated[bool, typer.Option("--last", help="The newest one (the default).")] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="LoRA: merge the adapter into the weights it was trained on."),
    ] = False,
) -> None:
    """Export a trained model from a run: a folder that transformers and vLLM load."""
    if sum((step is not None, best, last)) > 1:
        raise UserInputError("--step, --best and --last each name one checkpoint: give one of them")

    from agentrl_cli.launch.model_export import export_checkpoint

    choice: int | Literal["last", "best"] | None = "best" if best else "last" if last else step
    done = export_checkpoint(run, to, choice=choice, merge=merge)
    score = f" ({done.metric} {done.score.value:.4g})" if done.score is not None else ""
    megabytes = f"{done.num_bytes / 1e6:,.1f} MB"
    typer.echo(f"{done.kind} of step {done.step}{score}: {done.folder} ({megabytes})")
    if done.better_before is not None:
        typer.echo(f"note: before training, {done.metric} was better: {done.better_before:.4g}")
    if done.kind == "adapter":
        typer.echo("an adapter needs the model that it was trained on; --merge exports both as one")
