"""The trainer as a process of its own, up to where it would need servers that answer."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.machine import Machine
from agentrl_cli.config.resolved_run import resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import EngineError, ImportPathError, RunFolderError
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.trainer_group import TrainerGroup
from agentrl_cli.launch.processes.trainer_protocol import RunningServers, TrainerReport
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]

AGENT = """
import os

print("the agent is imported", [name for name in os.environ if name.startswith("AGENTRL_TRAINER")])


def build(api_key):
    assert api_key == "geheim", api_key

    async def answer(data):
        return 1.0

    return answer
"""


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and nobody else will."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def run(
    project: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[TrainerReport, str]]:
    """Starts a trainer in the folder that this process holds; its report and its log."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (project / "my_agent.py").write_text(AGENT)

    def run_trainer(*overrides: str, hold: bool = True) -> tuple[TrainerReport, str]:
        config = load_config(
            "experiment.yaml",
            [
                *("engine.kind=vllm", "engine.device=cpu", "engine.start_timeout_seconds=2"),
                *("agent_builder_kwargs={api_key: geheim}", "reward_fn_path=null"),
                *overrides,
            ],
        )
        folder = RunFolder.create_or_resume(config)
        if not hold:
            folder.close()
        endpoint = ServerEndpoint(
            name="vllm-0", base_url=f"http://127.0.0.1:{closed_port}", api_key="sk-of-the-server"
        )
        run = resolve_run(config, Machine(), purpose="train")
        servers = RunningServers(run=run, endpoints=(endpoint,))
        command = (
            sys.executable,
            "-m",
            "agentrl_cli.launch.processes.trainer_program",
            str(folder.path),
        )
        log = folder.log_path("trainer")
        with folder:
            trainer = TrainerGroup(
                [PlannedProcess(name="trainer", role="trainer", argv=command)],
                log.parent,
                servers,
                secrets=[["agent_builder_kwargs", "api_key", "geheim"]],
                observer=SilentObserver(),
            )
            deadline = time.monotonic() + 150
            while not trainer.has_ended():
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            return trainer.end(), log.read_text()

    return run_trainer


@pytest.mark.slow
def test_it_gets_its_secrets_and_says_that_no_server_answers(run: Callable[..., Any]) -> None:
    report, log = run()
    assert isinstance(report.error, EngineError), log
    assert "vllm-0" in str(report.error)
    assert "engine.start_timeout_seconds" in str(report.error)
    # What agents print is in the trainer's log, and agents do not see the servers' keys.
    assert "the agent is imported []" in log
    assert "geheim" not in log
    assert "sk-of-the-server" not in log


@pytest.mark.slow
def test_a_mistake_of_the_user_is_reported_as_one(run: Callable[..., Any]) -> None:
    report, _ = run("agent_builder_path=my_agent.bild")
    assert type(report.error) is ImportPathError
    assert report.error.exit_code == 2
    assert "build" in str(report.error)


@pytest.mark.slow
def test_a_folder_that_nobody_holds_is_left_alone(run: Callable[..., Any]) -> None:
    report, _ = run(hold=False)
    assert type(report.error) is RunFolderError
    assert str(os.getpid()) in str(report.error) or "not held" in str(report.error)
