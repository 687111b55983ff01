"""The pool's scheduling, on workers that are only sockets and do what they are told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_cli.errors import DatasetError, RunError
from agentrl_cli.records import Boundary
from agentrl_cli.rollout import worker_pool
from agentrl_cli.rollout.worker_channel import Channel
from agentrl_cli.rollout.worker_errors import (
    AgentCrashError,
    AgentRunError,
    build_process_error,
)
from agentrl_cli.rollout.worker_host import Host
from agentrl_cli.rollout.worker_lease import AgentTask
from agentrl_cli.rollout.worker_pool import WorkerPool
from agentrl_cli.rollout.worker_process import AgentSpec

FAILURE = {"boundary": "agent", "kind": "KeyError", "message": "state", "traceback": "..."}
SPEC = AgentSpec(path="x", kwargs={}, key="agent_builder_path")


@dataclass
class Script:
    """What the workers of a test do, and what was seen of them."""

    fails_to_start: bool = False
    num_started: int = 0
    running: set[int] = field(default_factory=set)
    most_running: int = 0
    tasks_of: dict[int, int] = field(default_factory=dict)
    killed: list[int] = field(default_factory=list)


class FakeHost:
    """Workers as tasks of the event loop; the row says how a trajectory ends."""

    script = Script()

    def __init__(self, max_memory_bytes) -> None:
        own, others = socket.socketpair()
        others.setblocking(False)
        self.reports, self._telling = Channel(own), Channel(others)
        self._numbers = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ends: list[socket.socket] = []

    def start_worker(self) -> tuple[int, Channel]:
        number = next(self._numbers)
        own, others = socket.socketpair()
        others.setblocking(False)
        self._ends += [others]
        self._tasks[number] = asyncio.create_task(self._live(number, Channel(others)))
        self.script.num_started += 1
        return number, Channel(own)

    def tell(self, op, **fields) -> None:
        if op == "kill":
            self.script.killed.append(fields["worker"])
            self._tasks[fields["worker"]].cancel()

    def read_stderr(self) -> str:
        return ""

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.reports.close()
        self._telling.close()
        for end in self._ends:
            end.close()

    async def _live(self, number: int, channel: Channel) -> None:
        script, status = self.script, 0
        try:
            while (message := await channel.receive_async()) is not None:
                if message["op"] == "end":
                    break
                if script.fails_to_start:
                    status = 5
                    break
                if message["op"] == "run":
                    how = message["row"]["how"]
                    script.tasks_of[number] = script.tasks_of.get(number, 0) + 1
                    script.running.add(number)
                    script.most_running = max(script.most_running, len(script.running))
                    await asyncio.sleep(0.002)
                    script.running.discard(number)
                    if how == "crash":
                        status = -11
                        break
                    await channel.send_async(_reply(how))
                await channel.send_async({"op": "idle"})
        except asyncio.CancelledError:
            status = -9
        finally:
            script.running.discard(number)
            channel.close()
        end = {"worker": number, "status": status, "cause": None, "memory_bytes": 0, "tail": []}
        with contextlib.suppress(OSError):
            self._telling.socket.setblocking(False)
            self._telling.send({"op": "ended", **end})


def _reply(how: str) -> dict[str, object]:
    if how == "fail":
        return {"op": "failed", "failure": FAILURE}
    if how == "refuse":
        return {"op": "refused", "error": "DatasetError", "message": "no such field"}
    return {"op": "done", "final_answer": how, "returned": None, "modules": []}


class NoRewards:
    """Nobody rewards anything here."""

    def set_reward(self, interaction_id, reward): ...
    def set_final_reward(self, reward): ...
    def apply_reward_discount(self, turn_discount=1.0): ...


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setattr(worker_pool, "HostProcess", FakeHost)
    FakeHost.script = Script()
    return FakeHost.script


async def run_one(pool: WorkerPool, how: str) -> str | None:
    async with pool.lease(how) as worker:
        task = AgentTask(
            agent=SPEC, row={"how": how}, model="m", base_url="b", api_key="k", max_turns=1
        )
        running = worker.run(task, NoRewards())
        if how == "late":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(running, 0.0005)
            return None
        return (await running).final_answer


EXPECTED = {
    "answer": "answer",
    "late": None,
    "fail": AgentRunError,
    "crash": AgentCrashError,
    "refuse": DatasetError,
}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    hows=st.lists(st.sampled_from(sorted(EXPECTED)), min_size=1, max_size=25),
    num_workers=st.integers(1, 4),
    max_tasks=st.integers(1, 3),
)
def test_every_trajectory_gets_a_worker_and_its_own_end(script, hows, num_workers, max_tasks):
    FakeHost.script = script = Script()

    async def go() -> list[object]:
        pool = WorkerPool(num_workers, max_tasks=max_tasks)
        try:
            async with asyncio.timeout(20):
                return await asyncio.gather(
                    *(run_one(pool, how) for how in hows), return_exceptions=True
                )
        finally:
            pool.close()
            await asyncio.sleep(0)

    for how, end in zip(hows, asyncio.run(go()), strict=True):
        if isinstance(EXPECTED[how], type):
            assert isinstance(end, EXPECTED[how]), (how, end)
        else:
            assert end == EXPECTED[how]
    assert script.most_running <= num_workers
    assert all(count <= max_tasks for count in script.tasks_of.values())
    # A worker whose agent failed works no more: each failure has cost one.
    num_spoilt = sum(how != "answer" for how in hows)
    assert script.num_started >= num_spoilt


async def test_failures_carry_what_the_worker_told(script):
    pool = WorkerPool(1)
    with pytest.raises(AgentRunError) as caught:
        await run_one(pool, "fail")
    failure = caught.value.failure
    assert (failure.boundary, failure.kind, failure.traceback) == (
        Boundary.AGENT,
        "KeyError",
        "...",
    )
    with pytest.raises(AgentCrashError, match="SIGSEGV"):
        await run_one(pool, "crash")
    pool.close()


async def test_a_worker_is_free_while_its_trajectory_is_judged(script):
    pool = WorkerPool(1, max_tasks=2)
    async with pool.lease("first") as worker:
        task = AgentTask(
            agent=SPEC, row={"how": "a"}, model="m", base_url="b", api_key="k", max_turns=1
        )
        await worker.run(task, NoRewards())
        # Here its reward would be computed.
        assert await asyncio.wait_for(run_one(pool, "b"), 5) == "b"
    assert script.tasks_of == {1: 2}
    assert await run_one(pool, "c") == "c"
    pool.close()


async def test_a_host_that_cannot_fork_says_so_and_lives_on(script, monkeypatch):
    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    own, others = (Channel(end) for end in socket.socketpair())
    host, channel = Host(others, None), socket.socketpair()
    assert host._start(7, channel[1].detach()) is None
    ended = own.receive()
    assert (ended["op"], ended["worker"], ended["cause"]) == ("ended", 7, "system")
    assert channel[0].recv(1) == b"", "nobody holds the other end"
    error = build_process_error(ended, None)
    assert "starts no further process" in str(error)
    assert "Resource temporarily unavailable" in str(error)
    channel[0].close()
    for end in (own, others):
        end.close()


async def test_workers_that_die_while_they_wait_leave_nothing_open(script):
    pool = WorkerPool(2, max_tasks=3)
    assert await run_one(pool, "a") == "a"
    while len(pool._ready) < 2:
        await asyncio.sleep(0.005)
    first, second = pool._ready
    for worker in (first, second):
        pool._kill(worker.number)
    while not (first.has_ended and second.has_ended):
        await asyncio.sleep(0.005)
    assert await run_one(pool, "b") == "b"
    assert (first._channel.socket.fileno(), second._channel.socket.fileno()) == (-1, -1)
    pool.close()


async def test_workers_that_never_start_end_the_run(script):
    script.fails_to_start = True
    pool = WorkerPool(2)
    with pytest.raises(RunError, match=r"as soon as they start, \d of them(.|\n)*exit status 5"):
        await asyncio.wait_for(run_one(pool, "a"), 10)
    pool.close()
    with pytest.raises(RunError, match="was closed"):
        await run_one(pool, "a")


def test_the_pool_serves_one_loop_after_another(script):
    pool = WorkerPool(2, max_tasks=5)

    async def use() -> str | None:
        return await run_one(pool, "a")

    assert asyncio.run(use()) == "a"
    assert asyncio.run(use()) == "a"
    pool.close()
