"""``agentrl train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_cli.cli.options import ConfigOption, OverridesArgument

if TYPE_CHECKING:
    from agentrl_cli.config.experiment import ExperimentConfig
    from agentrl_cli.launch.machine import Machine


def train_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the resolved configuration and the processes; start nothing."
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete what is in the run folder and start over."),
    ] = False,
) -> None:
    """Train an agent; typed again, it goes on where it was stopped."""
    from agentrl_cli.config.loading import load_config
    from agentrl_cli.launch.machine import Machine
    from agentrl_cli.launch.plan import check_supported

    experiment = load_config(config, overrides or [])
    experiment.check_trainable()
    machine = Machine.detect()
    if dry_run:
        _print_plan(experiment, machine)
        return
    check_supported(experiment, num_gpus=machine.num_gpus)

    from agentrl_cli.cli.display import build_observer
    from agentrl_cli.cli.failures import crashes_logged
    from agentrl_cli.cli.interrupt import stop_on_signals
    from agentrl_cli.cli.summary import print_summary
    from agentrl_cli.launch.local import run_training
    from agentrl_cli.store.run_folder import RunFolder, run_dir_of

    log = "command"
    with (
        crashes_logged(lambda: RunFolder(run_dir_of(experiment)).log_path(log)),
        build_observer(total_steps=experiment.train.total_steps) as observer,
        stop_on_signals(observer.on_message) as stop,
    ):
        result = run_training(experiment, observer=observer, overwrite=overwrite, stop=stop)
    if result.is_begun:
        run_folder = RunFolder.open(result.run_dir)
        print_summary(run_folder, config_path=config, overrides=overrides or [])
    if not result.is_complete:
        typer.echo("stopped before the last step; the same command goes on from here")


def _print_plan(experiment: ExperimentConfig, machine: Machine) -> None:
    """Prints the configuration and, as comments of it, the processes that it would start."""
    from agentrl_cli.config.loading import dump_config
    from agentrl_cli.launch.head import needs_untied_head
    from agentrl_cli.launch.interpreter import find_server_package
    from agentrl_cli.launch.plan import build_plan, check_supported, format_plan
    from agentrl_cli.launch.reading import describe_reading
    from agentrl_cli.store.run_folder import run_dir_of

    typer.echo(dump_config(experiment), nl=False)
    # A built-in model, or one on the hub, is not made or fetched for this.
    untied_head = Path(experiment.model.path).is_dir() and needs_untied_head(
        experiment, experiment.model.path, purpose="train", num_gpus=machine.num_gpus
    )
    run_dir = str(run_dir_of(experiment))
    plan = build_plan(experiment, machine, run_dir=run_dir, untied_head=untied_head)
    typer.echo(f"# run folder: {run_dir}\n# processes:")
    typer.echo("\n".join(f"#   {line}" for line in format_plan(plan).splitlines()))
    if any(process.role == "engine" for process in plan):
        ports = "" if experiment.engine.first_port else "--port 0: a free one is chosen; "
        typer.echo(f"# ({ports}the servers' keys are made when they start)")
    check_supported(experiment, num_gpus=machine.num_gpus)
    typer.echo(f"# {describe_reading(experiment)}")
    find_server_package(experiment, num_gpus=machine.num_gpus)
    typer.echo("# nothing was started (--dry-run)")
