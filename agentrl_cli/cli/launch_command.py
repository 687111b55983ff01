"""``agentrl launch``: scripts for the schedulers of clusters."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl_cli.cli.train_command import ConfigOption, OverridesArgument
from agentrl_cli.errors import ConfigError

launch_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@launch_app.callback()
def _scripts() -> None:
    """Write the script of a job that trains."""


@launch_app.command("slurm", short_help="A script for Slurm's sbatch.")
def slurm_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the job.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs of each node.")] = 0,
    cpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Cores of each node; default: whole nodes.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit, as of sbatch: 8:00:00 or 2-12:00:00.")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition, as of sbatch.")] = None,
) -> None:
    """Print a script that trains on the nodes of a Slurm job.

    Type sbatch FILE with what it prints. Before its time limit the run saves, and the job goes back
    into the queue.
    """
    from agentrl_cli.config.config_file import load_config
    from agentrl_cli.launch.slurm import SlurmJob, format_sbatch

    for option, text, pattern, allowed in (
        ("--time", time, r"(\d+-)?\d+(:\d+){0,2}", "MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS"),
        ("--partition", partition, r"[\w.,-]+", "names, with commas between them"),
    ):
        if text is not None and not re.fullmatch(pattern, text):
            raise ConfigError(f"{option} {text!r} is none of Slurm's. Allowed: {allowed}")
    experiment = load_config(config, overrides or [])
    experiment.check_trainable()
    job = SlurmJob(
        num_nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        time=time,
        partition=partition,
    )
    arguments = ["train", "--config", str(config), *(overrides or [])]
    bin_dir = Path(sys.executable).parent
    script = format_sbatch(experiment, job, arguments, folder=Path.cwd(), bin_dir=bin_dir)
    typer.echo(script, nl=False)
