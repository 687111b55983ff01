"""``agentrl serve``."""

from __future__ import annotations

import json
import shlex
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from agentrl_cli.cli.options import ConfigOption, OverridesArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl_cli.config.experiment import ExperimentConfig
    from agentrl_cli.launch.serving import ServedModel
    from agentrl_cli.log import Observer

_POLL_SECONDS = 0.1


def serve_command(
    config: ConfigOption,
    overrides: OverridesArgument = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1024, max=65535, help="Port on this machine; any free one otherwise.", metavar="N"
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen at; one that other machines reach needs a key "
            "[default: 127.0.0.1, or rollout.external.host with --online]",
            metavar="ADDR",
        ),
    ] = None,
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
    from agentrl_cli.config.loading import load_config

    experiment = load_config(config, overrides or [])

    from agentrl_cli.cli.display import build_observer
    from agentrl_cli.cli.failures import crashes_logged
    from agentrl_cli.cli.interrupt import stop_on_signals
    from agentrl_cli.store.run_folder import RunFolder, run_dir_of

    with (
        crashes_logged(lambda: RunFolder(run_dir_of(experiment)).log_path("serve")),
        ExitStack() as stack,
    ):
        # The display ends before anything is shown that will be copied: it breaks long lines.
        with build_observer() as observer:
            listening = _Listening(observer, port, host, api_key)
            shown, check = _start(experiment, listening, stack, is_online=online)
        with stop_on_signals(lambda _: typer.echo("stopping")) as stop:
            typer.echo(shown)
            while not stop.is_set():
                check()
                time.sleep(_POLL_SECONDS)
    typer.echo("stopped serving")


class _Listening(NamedTuple):
    """What both ways of serving are told."""

    observer: Observer
    port: int | None
    host: str | None
    api_key: str | None


def _start(
    experiment: ExperimentConfig, listening: _Listening, stack: ExitStack, *, is_online: bool
) -> tuple[str, Callable[[], None]]:
    """Starts to serve; what to show, and what raises once it cannot go on."""
    from agentrl_cli.launch.online import serve_online
    from agentrl_cli.launch.serving import serve_model

    options: dict[str, Any] = listening._asdict()
    if is_online:
        service = serve_online(experiment, on_finished=typer.echo, **options)
        online = stack.enter_context(service)
        return online.text, online.check
    served = stack.enter_context(serve_model(experiment, **options))
    return format_served(served), served.check


def format_served(served: ServedModel) -> str:
    """What a person types to use the model."""
    key = served.api_key if served.is_own_key else "$AGENTRL_API_KEY"
    authorization = (
        f"'Authorization: Bearer {key}'" if served.is_own_key else f'"Authorization: Bearer {key}"'
    )
    request = json.dumps(
        {
            "model": served.model_name,
            "messages": [{"role": "user", "content": "What is 17 + 25?"}],
        }
    )
    return (
        f"{served.model_name} is served (Ctrl-C ends it; logs: {served.log_dir}). For an agent:\n\n"
        f"  export OPENAI_BASE_URL={served.base_url}\n"
        f"  export OPENAI_API_KEY={key}\n"
        f"  model name: {served.model_name}\n\n"
        f"By hand:\n\n"
        f"  curl {served.base_url}/chat/completions \\\n"
        f"    -H {authorization} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(request)}\n"
    )
