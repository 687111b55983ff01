"""``agentrl inspect-micro-batch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect_micro_batch_command(
    path: Annotated[
        Path, typer.Argument(help="Its folder: RUN/micro-batches/step-*.", metavar="FOLDER")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="JSON for machines.")] = False,
) -> None:
    """Look at a micro-batch whose loss or gradient was NaN or infinite."""
    from agentrl_cli.inspector.micro_batch_view import inspect_micro_batch
    from agentrl_cli.inspector.show import build_console

    inspect_micro_batch(path, as_json=as_json, console=build_console())
