"""The command line of a further Python process that finds the same modules as this one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from agentrl_cli.rollout import worker_host; "
    "getattr(worker_host, sys.argv[1])(*sys.argv[2:])"
)


def build_command(function: str, *arguments: str) -> list[str]:
    """What runs a function of :mod:`agentrl_cli.rollout.worker_host` in a new interpreter.

    The modules that a user's agent imports are found there as they are here, be it beside the
    YAML, by PYTHONPATH, or by what a test has added to ``sys.path``.
    """
    # "" stands for the current folder, of which an agent may leave.
    path = [str(Path(entry).absolute()) for entry in sys.path]
    # Unbuffered: what an agent printed last is not lost with its process.
    return [sys.executable, "-u", "-c", _CODE, json.dumps(path), function, *arguments]
