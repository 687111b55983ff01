"""Programs elsewhere whose sessions a rollout worker holds: one address, as long as the run."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

Sites = Callable[..., Any]
KEY = "sk-agentrl-admin-test"
OWN = {"question": "a task of the program"}


class Program:
    """What a program elsewhere does, by plain HTTP."""

    def __init__(self, notice: str) -> None:
        url, key = re.findall(r"=(\S+)\n", notice)
        assert key == KEY
        self.url = url

    def call(self, path: str, key: str = KEY, **body: Any) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx2.post(self.url + path, json=body, headers=headers, timeout=60)

    def start(self, **asked: Any) -> Any:
        reply = self.call("/agentrl/v1/sessions", **asked)
        assert reply.status_code == 201, reply.text
        return reply.json()

    def ask(self, session: Any) -> int:
        messages = [{"role": "user", "content": "hi"}]
        key = session["api_key"]
        return self.call("/v1/chat/completions", key, model="m", messages=messages).status_code

    def end(self, session: Any, reward: float) -> None:
        assert self.ask(session) == 200
        reply = self.call(f"/agentrl/v1/sessions/{session['id']}/end", reward=reward)
        assert reply.status_code == 200, reply.text


@pytest.fixture
def outside(site: Sites, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A site with one worker for programs elsewhere, and the notices that it gives."""
    monkeypatch.delenv("AGENTRL_API_KEY", raising=False)
    s = site()
    s.start(num_workers=1, random_key=KEY, agent_mode="external")
    return s


def list_notices(site: Any) -> list[str]:
    return [text for text in site.messages.texts if "AGENTRL_URL" in text]


def find_program(site: Any) -> Program:
    site.wait_for(lambda: list_notices(site), "nobody is told the address")
    return Program(list_notices(site)[0])


@pytest.mark.slow
def test_a_program_gets_a_task_and_its_trajectory_comes_back(outside: Any) -> None:
    future = outside.submit("What is 2 + 2?")
    program = find_program(outside)
    session = program.start()
    assert session["task"] == {"question": "What is 2 + 2?"}
    program.end(session, reward=0.5)
    trajectory = future.result(60)
    assert (trajectory.reward, trajectory.final_answer, trajectory.failure) == (0.5, "4", None)
    assert trajectory.task == {"question": "What is 2 + 2?"}
    assert all(v == 0 for v in trajectory.interactions[0].versions if v >= 0)


@pytest.mark.slow
def test_address_and_key_outlive_a_worker_and_a_group_stays_one_task(outside: Any) -> None:
    first, second = (outside.submit("?", number=0, sample_index=index) for index in (0, 1))
    program = find_program(outside)
    program.end(program.start(task=OWN, group_id="mine"), reward=1.0)
    assert first.result(60).task == OWN
    lost = program.start(group_id="mine")
    [pid] = outside.pids
    os.kill(pid, signal.SIGKILL)
    outside.wait_for(lambda: outside.pids not in ([], [pid]), "no worker replaces it")
    outside.wait_until_ready(1)
    outside.wait_for(lambda: _answers(program), "the address is gone")
    assert program.ask(lost) == 401
    # The other trajectory of the group is made once more, of the same task.
    again = program.start(wait_seconds=30)
    assert (again["task"], again["trajectory_id"]) == (OWN, lost["trajectory_id"])
    program.end(again, reward=0.0)
    trajectory = second.result(60)
    assert (trajectory.reward, trajectory.task, trajectory.task_id) == (0.0, OWN, "mine")
    assert len(list_notices(outside)) == 1


def _answers(program: Program) -> bool:
    try:
        headers = {"Authorization": f"Bearer {KEY}"}
        url = f"{program.url}/agentrl/v1/sessions"
        return httpx2.get(url, headers=headers).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.slow
def test_a_program_that_waits_when_the_run_ends_is_told_so(outside: Any) -> None:
    outside.submit("?")
    program = find_program(outside)
    program.start()
    replies: list[httpx2.Response] = []
    waiting = threading.Thread(
        target=lambda: replies.append(program.call("/agentrl/v1/sessions", wait_seconds=50))
    )
    waiting.start()
    waiting.join(1.0)
    outside.workers.close()
    waiting.join(60)
    assert [(r.status_code, r.json()["error"]["code"]) for r in replies] == [(503, "run_ended")]
