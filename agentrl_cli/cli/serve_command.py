"""``agentrl serve``."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import typer

from agentrl_cli.cli.eval_command import CheckpointOption, check_checkpoint, open_checkpoint
from agentrl_cli.cli.train_command import ConfigOption, OverridesArgument

_POLL_SECONDS = 0.1
HostOption = Annotated[
    str | None,
    typer.Option(
        help="Address to listen at; one that other machines reach needs a key "
        "[default: 127.0.0.1, or rollout.external.host with --online]",
        metavar="ADDR",
    ),
]


def serve_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    checkpoint: CheckpointOption = None,
    port: Annotated[
        int | None,
        typer.Option(min=1024, max=65535, help="Port; any free one otherwise.", metavar="N"),
    ] = None,
    host: HostOption = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The key to ask for, instead of a random one; other users of this machine see "
            "what is typed, so rather set the variable.",
            envvar="AGENTRL_API_KEY",
            metavar="KEY",
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Give out sessions to programs elsewhere and store their trajectories "
            "(docs/external-agents.md).",
        ),
    ] = False,
) -> None:
    """Serve the model, to try an agent by hand or to record programs; Ctrl-C ends it."""
    check_checkpoint(checkpoint)
    from agentrl_cli.config.config_file import load_config

    experiment = load_config(config, overrides or [])

    from agentrl_cli.cli.command_exit import crashes_logged, stop_on_signals
    from agentrl_cli.cli.display.progress_display import build_observer
    from agentrl_cli.store.layout import run_dir_of
    from agentrl_cli.store.run_folder import RunFolder

    with (
        crashes_logged(lambda: RunFolder.open_log(run_dir_of(experiment), "serve")),
        ExitStack() as stack,
    ):
        folder = stack.enter_context(open_checkpoint(checkpoint))
        # The display ends before anything is shown that will be copied: it breaks long lines.
        with build_observer() as observer:
            from agentrl_cli.launch.model_serving import ListenAddress, serve_model, serve_online

            serve = partial(serve_online, on_finished=typer.echo) if online else serve_model
            address = ListenAddress(port, host, api_key)
            served = stack.enter_context(
                serve(experiment, observer=observer, address=address, checkpoint=folder)
            )
        with stop_on_signals(lambda _: typer.echo("stopping")) as stop:
            typer.echo(served.text)
            while not stop.is_set():
                served.check()
                time.sleep(_POLL_SECONDS)
    typer.echo("stopped serving")
