"""The ``agentrl`` command: its sub-commands, and what happens to errors that leave them."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from agentrl_cli.cli.check_command import check_command
from agentrl_cli.cli.command_exit import outlive_readers, run_reporting_failures
from agentrl_cli.cli.compare_command import compare_command
from agentrl_cli.cli.env_command import env_command
from agentrl_cli.cli.eval_command import evaluate_command
from agentrl_cli.cli.export_command import export_command
from agentrl_cli.cli.launch_command import launch_app
from agentrl_cli.cli.new_project.init_command import init_command
from agentrl_cli.cli.serve_command import serve_command
from agentrl_cli.cli.sft_command import sft_command
from agentrl_cli.cli.stored_runs.export_trajectories_command import export_trajectories_command
from agentrl_cli.cli.stored_runs.inspect_command import inspect_command
from agentrl_cli.cli.stored_runs.report_command import report_command
from agentrl_cli.cli.stored_runs.runs_command import runs_command
from agentrl_cli.cli.train_command import train_command
from agentrl_cli.errors import format_nearest


class _Commands(TyperGroup):
    """The commands; who types another name is told the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            ctx.fail(f"no such command: {args[0]!r}; {format_nearest(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="agentrl",
    cls=_Commands,
    help="Make any LLM agent better at its job by reinforcement learning, with one command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Plain help: loading the styled one would double the time of --help.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init", short_help="Write a project to begin with.")(init_command)
app.command("train", short_help="Train an agent.")(train_command)
app.command("check", short_help="Look before training: will it work?")(check_command)
app.command("eval", short_help="Measure an agent.")(evaluate_command)
app.command("compare", short_help="Measure models against each other.")(compare_command)
app.command("inspect-trajectories", short_help="Look at what agents did.")(inspect_command)
app.command("report", short_help="Make a page about a run for a browser.")(report_command)
app.command("runs", short_help="List runs: are they running, how far, how good.")(runs_command)
app.command("export", short_help="Export a trained model from a run.")(export_command)
app.command("export-trajectories", short_help="Write trajectories to train on.")(
    export_trajectories_command
)
app.command("serve", short_help="Serve the model, to try an agent by hand.")(serve_command)
app.add_typer(launch_app, name="launch", short_help="Write a script for a cluster's scheduler.")
app.command("env", short_help="Print what a bug report needs.")(env_command)
app.command("sft", short_help="Train a model on conversations.")(sft_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from agentrl_cli import __version__

        typer.echo(f"agentrl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of every sub-command."""


def main() -> None:
    """Runs the command line and exits with its code: 0 done, 1 failed, 2 wrong input."""
    outlive_readers()
    sys.exit(run_reporting_failures(app))
