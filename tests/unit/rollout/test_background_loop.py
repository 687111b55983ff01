"""The background loop: results, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress

import pytest

from agentrl_cli.rollout import background_loop
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.external.task_queue import TaskQueue
from agentrl_cli.rollout.rollout_failures import DeadlineError, run_with_deadline
from agentrl_cli.tracking.session import Budget, Session


async def _value(value):
    await asyncio.sleep(0)
    return value


async def _raise(error):
    raise error


def test_runs_coroutines_in_another_thread_and_returns_their_results():
    async def thread():
        return threading.get_ident()

    with BackgroundLoop() as loop:
        assert loop.run(_value(3), 5) == 3
        assert loop.run(thread(), 5) != threading.get_ident()
        assert loop.submit(_value(4)).result(5) == 4
        with pytest.raises(KeyError):
            loop.run(_raise(KeyError("x")), 5)

        async def wait_for_itself():
            loop.run(_value(1), 5)

        with pytest.raises(RuntimeError, match="wait for its own thread"):
            loop.run(wait_for_itself(), 5)


def test_a_deadline_cancels_and_is_told_from_the_coroutines_own_timeout():
    cancelled = threading.Event()

    async def hang():
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with BackgroundLoop() as loop:
        with pytest.raises(TimeoutError, match=r"hang did not finish in 0.05 seconds"):
            loop.run(hang(), 0.05)
        assert cancelled.wait(5)
        with pytest.raises(TimeoutError, match="my own"):
            loop.run(_raise(TimeoutError("my own")), 5)


def test_close_cancels_everything_and_refuses_more():
    ended = []

    async def hang(name):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(name)

    loop = BackgroundLoop()
    futures = [loop.submit(hang(i)) for i in range(3)]
    loop.run(_value(0), 5)
    loop.close()
    loop.close()
    assert sorted(ended) == [0, 1, 2]
    assert all(f.cancelled() for f in futures)
    with pytest.raises(RuntimeError, match="closed"):
        loop.submit(_value(1))


def test_close_has_a_deadline_even_for_code_that_blocks_the_loop():
    release = threading.Event()
    started = threading.Event()

    async def block():
        started.set()
        release.wait(20)

    loop = BackgroundLoop()
    loop.submit(block())
    assert started.wait(5)
    began = time.perf_counter()
    loop.close(timeout_seconds=0.1)
    assert time.perf_counter() - began < 5
    release.set()
    loop.close(timeout_seconds=5)
    assert not loop._thread.is_alive()


async def test_deadline_holds_for_code_that_swallows_its_cancellation(monkeypatch):
    monkeypatch.setattr("agentrl_cli.rollout.rollout_failures.GRACE_SECONDS", 0.1)
    release = asyncio.Event()

    async def stubborn():
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    with pytest.raises(DeadlineError, match=r"it did not finish in 0.01 seconds"):
        await run_with_deadline(stubborn(), 0.01, "it")
    release.set()
    await asyncio.sleep(0.01)
    assert len(asyncio.all_tasks()) == 1


async def test_outer_cancellation_ends_the_inner_code():
    ended = asyncio.Event()

    async def inner():
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_with_deadline(inner(), 60, "it"), 0.01)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("error", "message"),
    [(SystemExit(2), r"it called exit\(2\)"), (asyncio.CancelledError(), "cancelled itself")],
)
async def test_exit_and_own_cancellation_are_ordinary_errors(error, message):
    with pytest.raises(RuntimeError, match=message):
        await run_with_deadline(_raise(error), 5, "it")


def test_many_blocking_tools_wait_at_the_same_time():
    gate = threading.Barrier(64, timeout=20)

    async def use_tools():
        await asyncio.gather(*(asyncio.to_thread(gate.wait) for _ in range(64)))

    with BackgroundLoop() as loop:
        loop.run(use_tools(), 30)


def test_exit_in_a_task_of_an_agents_own_ends_neither_the_loop_nor_the_run():
    async def call_tool():
        raise SystemExit(0)

    async def run_tools():
        await asyncio.gather(call_tool(), asyncio.sleep(5))

    with BackgroundLoop() as loop:
        meanwhile = loop.submit(asyncio.sleep(0.2, "alive"))
        with pytest.raises(RuntimeError, match=r"the agent called exit\(0\)"):
            loop.run(run_with_deadline(run_tools(), 5, "the agent"), 10)
        assert meanwhile.result(5) == "alive"
        assert loop.run(_value(3), 5) == 3


def test_time_in_which_the_process_was_stopped_counts_against_no_deadline(monkeypatch):
    asleep = 0.0
    monkeypatch.setattr(background_loop, "_read_clock", lambda: time.monotonic() + asleep)

    async def wait_over_night():
        nonlocal asleep
        budget = Session(object, budget=Budget(max_seconds=60.0))
        queue = TaskQueue(max_wait_seconds=60.0, max_sessions=1)
        asleep = 8 * 3600.0
        await asyncio.sleep(0.05)
        return min(budget.seconds_left, queue._find_patience(0.0))

    with BackgroundLoop() as loop:
        left = loop.run(run_with_deadline(wait_over_night(), 60.0, "the agent"), 60.0)
        assert 30.0 < left <= 60.0
        # What is not a stop counts.
        asleep += 5.0
        with pytest.raises(DeadlineError):
            loop.run(run_with_deadline(asyncio.sleep(60), 0.1, "the agent"), 60.0)
