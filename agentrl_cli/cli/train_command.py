"""``agentrl train``."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.errors import ConfigError

if TYPE_CHECKING:
    from agentrl_cli.config.experiment import ExperimentConfig
    from agentrl_cli.config.resolved_run import ResolvedRun
    from agentrl_cli.launch.placement import Placement
    from agentrl_cli.launch.torchrun import TorchrunRank

#: What every command with an experiment takes.
ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", help="The experiment's YAML file.", metavar="FILE")
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Change keys of the file, for example seed=2.",
        show_default=False,
    ),
]

_LEAVING = (
    "stopping: the job finishes and saves a step in progress, then ends (Ctrl-C again leaves it to "
    "that)\n"
)


def train_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the resolved configuration and the processes, and try all that it names; "
            "start nothing.",
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete what is in the run folder and start over."),
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Train once with each seed, one after the other, as trials NAME-seed1, "
            "NAME-seed2...; report the mean over them.",
            metavar="1,2,3",
        ),
    ] = None,
) -> None:
    """Train an agent; typed again, it resumes where it stopped."""
    from agentrl_cli.config.config_file import load_config
    from agentrl_cli.launch.torchrun import TorchrunRank, reported_once
    from agentrl_cli.store.layout import run_dir_of

    rank = TorchrunRank.take(os.environ)
    with reported_once(rank), ExitStack() as stack:
        if seeds is not None:
            code = _train_seeds(config, overrides or [], seeds, rank, dry_run, overwrite)
            raise typer.Exit(code)
        experiment = load_config(config, overrides or [])
        experiment.check_trainable()
        from agentrl_cli.launch.local_run import find_dashboard, place_run
        from agentrl_cli.launch.trainer import train_beside

        if rank is None and (url := find_dashboard(experiment)) is not None:
            flags = [*(["--dry-run"] if dry_run else []), *(["--overwrite"] if overwrite else [])]
            raise typer.Exit(_run_as_job(experiment, url, config, [*flags, *(overrides or [])]))
        run, placement = place_run(experiment, stack, rank)
        if rank is not None and overwrite:
            raise ConfigError(
                "--overwrite: torchrun repeats the command when it starts the ranks again, and "
                "would delete what they have learned. Delete the run folder yourself, or type "
                "another trial_name=NAME"
            )
        if rank is not None and not rank.is_first:
            if not dry_run:
                train_beside(experiment, run, rank.rendezvous, run_dir_of(experiment))
        elif dry_run:
            _print_plan(experiment, run, placement, overwrite=overwrite)
        else:
            _train(experiment, run, placement, config, overrides or [], overwrite=overwrite)


def _train_seeds(
    config: Path,
    overrides: list[str],
    seeds: str,
    rank: TorchrunRank | None,
    dry_run: bool,
    overwrite: bool,
) -> int:
    """The exit code of a run with each seed."""
    from agentrl_cli.cli.seed_runs import train_seeds
    from agentrl_cli.inspector.inspect_run import build_console

    if rank is not None:
        raise ConfigError(
            "--seeds: torchrun starts the ranks of one run. Start it once for each seed, with "
            "seed=1 trial_name=NAME-seed1"
        )

    def train(words: list[str]) -> None:
        train_command(config, words, dry_run=dry_run, overwrite=overwrite)

    skip = not (dry_run or overwrite)
    results = train_seeds(train, config, overrides, seeds, skip_finished=skip)
    if not dry_run:
        results.print(build_console())
    return results.exit_code


def _run_as_job(experiment: ExperimentConfig, url: str, config: Path, words: list[str]) -> int:
    """The exit code of the command, which a cluster runs."""
    from agentrl_cli.cli.command_exit import stop_on_signals
    from agentrl_cli.launch.ray.job import run_as_job

    def show(text: str) -> None:
        typer.echo(text, nl=False)

    with stop_on_signals(lambda _: show(_LEAVING)) as stop:
        code = run_as_job(experiment, url, config, words, show=show, stop=stop)
    return (code and stop.exit_code) or code


def _train(
    experiment: ExperimentConfig,
    run: ResolvedRun,
    placement: Placement,
    config: Path,
    overrides: list[str],
    *,
    overwrite: bool,
) -> None:
    from agentrl_cli.cli.command_exit import crashes_logged, stop_on_signals
    from agentrl_cli.cli.display.final_report import print_summary
    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.launch.local_run import run_training
    from agentrl_cli.store.layout import run_dir_of
    from agentrl_cli.store.run_folder import RunFolder

    with (
        crashes_logged(lambda: RunFolder.open_log(run_dir_of(experiment), "command")),
        build_observer(total_steps=experiment.train.total_steps) as observer,
        # torchrun has its own patience, and may repeat what the terminal or Slurm has sent already.
        stop_on_signals(
            observer.on_message, "interrupt" if placement.rendezvous is None else "wait"
        ) as stop,
    ):
        is_done = run_training(
            *(experiment, run, placement), observer=observer, overwrite=overwrite, stop=stop
        )
    if is_done is not None:
        run_folder = RunFolder.open(run_dir_of(experiment))
        print_summary(run_folder, config_path=config, overrides=overrides)
    if not is_done:
        typer.echo("stopped before the last step; the same command resumes from here")
        raise typer.Exit(stop.exit_code)


def _print_plan(
    experiment: ExperimentConfig, run: ResolvedRun, placement: Placement, *, overwrite: bool
) -> None:
    """Prints the configuration and, as comments of it, the processes that it would start.

    Raises:
        UserInputError: something that it names cannot be used.
    """
    from agentrl_cli.config.config_file import dump_config
    from agentrl_cli.launch.local_run import try_input
    from agentrl_cli.launch.plan import build_plan, format_plan
    from agentrl_cli.launch.run_resolution import (
        check_supported,
        describe_reading,
        with_output_head,
    )
    from agentrl_cli.store.layout import run_dir_of

    typer.echo(dump_config(experiment), nl=False)
    # A built-in model, or one on the hub, is not made or fetched for this.
    if Path(experiment.model.path).is_dir():
        run = with_output_head(run, experiment, experiment.model.path)
    run_dir = run_dir_of(experiment)
    plan = build_plan(experiment, run)
    typer.echo(f"# run folder: {run_dir}\n# processes:")
    typer.echo("\n".join(f"#   {line}" for line in format_plan(plan).splitlines()))
    for line in placement.describe(experiment, run):
        typer.echo(f"#   {line}")
    if run.servers:
        ports = "" if experiment.engine.first_port else "--port 0: a free one is chosen; "
        typer.echo(f"# ({ports}the servers' keys are made when they start)")
    check_supported(experiment, run)
    typer.echo(f"# {describe_reading(experiment)}")
    if run.dtype_advice is not None:
        typer.echo(f"# {run.dtype_advice}")
    for line in try_input(experiment, run, overwrite=overwrite):
        typer.echo(f"# not looked at: {line}")
    typer.echo("# nothing was started (--dry-run)")
