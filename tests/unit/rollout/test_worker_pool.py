"""The pool's scheduling on workers without a process, and their log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.agents.agent_building import AgentSpec
from agentrl_cli.agents.agent_runner import AgentOutcome
from agentrl_cli.errors import RunError
from agentrl_cli.rollout.workers.worker_pool import WorkerPool
from agentrl_cli.rollout.workers.worker_process import (
    AgentCrashError,
    AgentExitError,
    WorkerLog,
    WorkerOutput,
)

SPEC = AgentSpec(path="x", kwargs={}, key="agent_builder_path")


@dataclass
class Script:
    """What the workers of a test do, and what was seen of them."""

    fails_to_start: bool = False
    num_running: int = 0
    max_running: int = 0
    workers: list[FakeWorker] = field(default_factory=list)

    def start(self) -> FakeWorker:
        self.workers.append(FakeWorker(self))
        return self.workers[-1]


class FakeWorker:
    """A worker whose agents end as the call says: with ``answer``, ``crash``, ``late`` or ``leave``
    (something behind)."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_tasks = 0
        self.has_ended = False
        self.is_running = False
        self._how = ""

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        if self._script.fails_to_start:
            self.has_ended = True
            raise AgentExitError("exit status 5")
        return self._how != "leave"

    def begin(self, label: str) -> None:
        """Writes nothing."""

    async def run(self, spec: AgentSpec, call: Any) -> AgentOutcome:
        assert not self.has_ended
        assert not self.is_running
        self.is_running = True
        self.num_tasks += 1
        self._how, script = call, self._script
        script.num_running += 1
        script.max_running = max(script.max_running, script.num_running)
        try:
            await asyncio.sleep(10 if call == "late" else 0.002)
        except asyncio.CancelledError:
            self.has_ended = True
            raise
        finally:
            self.is_running = False
            script.num_running -= 1
        if call == "crash":
            self.has_ended = True
            raise AgentCrashError("SIGSEGV")
        return AgentOutcome(final_answer=call)

    def retire(self) -> None:
        self.has_ended = True

    end = kill = retire


async def run_one(pool: WorkerPool, how: str) -> str | None:
    async with pool.take(how) as worker:
        running = worker.run(SPEC, how)  # type: ignore[arg-type]
        outcome = await asyncio.wait_for(running, 0.01 if how == "late" else 5)
        # Its reward takes longer than the next trajectory of the worker.
        pool.give_back(worker)
        await asyncio.sleep(0.005)
        return outcome.final_answer


@settings(max_examples=25, deadline=None)
@given(
    hows=st.lists(st.sampled_from(["answer", "crash", "late", "leave"]), min_size=1, max_size=20),
    num_workers=st.integers(1, 4),
    max_tasks=st.integers(1, 3),
)
def test_every_trajectory_gets_a_worker_and_its_own_end(hows, num_workers, max_tasks):
    script = Script()

    async def go() -> list[object]:
        pool = WorkerPool(num_workers, script.start, max_tasks=max_tasks)  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            ends = await asyncio.gather(
                *(run_one(pool, how) for how in hows), return_exceptions=True
            )
        pool.close()
        return ends

    errors = {"crash": AgentCrashError, "late": TimeoutError}
    for how, end in zip(hows, asyncio.run(go()), strict=True):
        assert isinstance(end, errors[how]) if how in errors else end == how
    assert script.max_running <= num_workers
    assert all(worker.num_tasks <= max_tasks for worker in script.workers)
    # A worker that ended, or whose agent left something behind, works no more.
    assert len(script.workers) >= sum(how != "answer" for how in hows)
    assert all(worker.has_ended for worker in script.workers)


async def test_a_worker_is_free_while_its_trajectory_is_judged():
    script = Script()
    pool = WorkerPool(1, script.start, max_tasks=3)  # type: ignore[arg-type]
    async with pool.take("first") as worker:
        await worker.run(SPEC, "a")  # type: ignore[arg-type]
        pool.give_back(worker)
        # Here its reward would be computed.
        assert await asyncio.wait_for(run_one(pool, "b"), 5) == "b"
    assert await run_one(pool, "c") == "c"
    assert [worker.num_tasks for worker in script.workers] == [3]
    pool.close()


async def test_workers_that_never_start_end_the_run():
    script = Script(fails_to_start=True)
    pool = WorkerPool(2, script.start)  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"as soon as they start, 3 of them in a row: exit status 5"):
        await asyncio.wait_for(run_one(pool, "a"), 10)
    pool.close()
    with pytest.raises(RunError, match="was closed"):
        await run_one(pool, "a")


def test_the_pool_serves_one_loop_after_another():
    script = Script()
    pool = WorkerPool(1, script.start, max_tasks=5)  # type: ignore[arg-type]

    async def use() -> list[str | None]:
        return await asyncio.gather(run_one(pool, "a"), run_one(pool, "b"))

    assert asyncio.run(use()) == asyncio.run(use()) == ["a", "b"]
    pool.close()


def test_the_log_says_whose_line_it_is_and_keeps_no_key(tmp_path, caplog):
    log = WorkerLog()
    first, second = WorkerOutput(log), WorkerOutput(log)
    log.open(tmp_path / "nowhere" / "x.log")
    assert "No such file" in caplog.text
    log.open(tmp_path / "x.log")
    first.begin("000001.000/0")
    first.write(b"one\ntw")
    second.write("grüße\n".encode())
    first.write(b"o\nkey sk-agentrl-0123456789\nno end")
    first.end_line()
    assert first.quote().splitlines()[2:] == ["  | one", "  | two", "  | key ***", "  | no end"]
    log.close()
    assert (tmp_path / "x.log").read_text().splitlines() == [
        "000001.000/0 | one",
        "agent worker | grüße",
        "000001.000/0 | two",
        "000001.000/0 | key ***",
        "000001.000/0 | no end",
    ]


@pytest.mark.slow
def test_a_trajectory_that_prints_for_ever_does_not_fill_the_disk(tmp_path):
    log = WorkerLog()
    log.open(tmp_path / "x.log")
    output = WorkerOutput(log)
    output.begin("first")
    for number in range(5000):
        output.write(b"%d %s\n" % (number, b"x" * 2000))
    output.begin("second")
    output.write(b"heard\n")
    log.close()
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert (tmp_path / "x.log").stat().st_size < 5 * 2**20
    assert lines[-2:] == ["first | (what it wrote after 4 MiB is not kept)", "second | heard"]
