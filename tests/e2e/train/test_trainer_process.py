"""The trainer as a process of its own, up to where it would need servers that answer."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import EngineError, ImportPathError
from agentrl_cli.launch.placement import LocalPlacement
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
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TrainerReport, str]]:
    """Starts a trainer in the folder that this process holds; its report and its log."""
    monkeypatch.chdir(project)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (project / "my_agent.py").write_text(AGENT)

    def run_trainer(*overrides: str) -> tuple[TrainerReport, str]:
        config = load_config(
            "experiment.yaml",
            [
                *("engine.kind=vllm", "engine.device=cpu", "engine.start_timeout_seconds=2"),
                *("agent_builder_kwargs={api_key: geheim}", "reward_fn_path=null"),
                *overrides,
            ],
        )
        program = "agentrl_cli.launch.processes.trainer_program"
        with RunFolder.create_or_resume(config) as folder, socket.socket() as held:
            # Nobody listens there, and nobody else will.
            held.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{held.getsockname()[1]}"
            endpoint = ServerEndpoint(name="vllm-0", base_url=url, api_key="sk-of-the-server")
            resolved = resolve_run(config, Machine(), purpose="train")
            argv = (sys.executable, "-m", program)
            log = folder.log_path("trainer")
            trainer = TrainerGroup(
                [PlannedProcess(name="trainer", role="trainer", argv=argv)],
                log.parent,
                RunningServers(run=resolved, endpoints=(endpoint,)),
                owner=lambda: folder.owner,
                secrets=[["agent_builder_kwargs", "api_key", "geheim"]],
                observer=SilentObserver(),
                placement=LocalPlacement(),
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
