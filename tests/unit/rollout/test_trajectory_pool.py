"""How many trajectories run at a time, by the engine's load; and which are made again."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl_cli.engine.protocol import EngineLoad
from agentrl_cli.records import Boundary, Failure, FailureCause, Interaction, Trajectory
from agentrl_cli.rollout import trajectory_pool
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.trajectory_pool import ConcurrencyLimit, TrajectoryPool
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow


class Simulation:
    """Agents that call the model and use tools in turns; seats, and memory for so many calls."""

    def __init__(self, *, seats: int, memory: int, call_steps: int, tool_steps: int) -> None:
        self.seats, self.memory = seats, memory
        self.call_steps, self.tool_steps = call_steps, tool_steps
        self.chance = random.Random(3)
        self.agents: list[list[int]] = []
        """For each agent: is it at a tool (1), waiting (2) or running (3), and the steps left."""

    def run(self, limit: int, num_steps: int) -> EngineLoad:
        for _ in range(num_steps):
            while len(self.agents) < limit:
                self.agents.append([2, 0])
            for agent in self.agents:
                agent[1] -= 1
                if agent[1] <= 0 and agent[0] != 2:
                    if agent[0] == 3 and self.chance.random() < 0.2 and len(self.agents) > limit:
                        agent[0] = 0
                        continue
                    agent[:] = [2, 0] if agent[0] == 1 else [1, self._draw(self.tool_steps)]
            self.agents = [agent for agent in self.agents if agent[0]]
            running = [agent for agent in self.agents if agent[0] == 3]
            for agent in self.agents:
                if agent[0] == 2 and len(running) < min(self.seats, self.memory):
                    agent[:] = [3, self._draw(self.call_steps)]
                    running.append(agent)
        states = [agent[0] for agent in self.agents]
        return EngineLoad(
            num_seats=self.seats,
            num_running=states.count(3),
            num_waiting=states.count(2),
            cache_use=states.count(3) / self.memory,
        )

    def _draw(self, mean: int) -> int:
        return max(1, round(self.chance.expovariate(1 / mean))) if mean else 0


@pytest.mark.parametrize("memory", [1000, 24])
@pytest.mark.parametrize(("call_steps", "tool_steps"), [(20, 0), (20, 20), (10, 90)])
def test_the_seats_are_filled_and_few_calls_wait(
    memory: int, call_steps: int, tool_steps: int
) -> None:
    engine = Simulation(seats=32, memory=memory, call_steps=call_steps, tool_steps=tool_steps)
    limit = ConcurrencyLimit(floor=4, ceiling=2000)
    limit.update(0, engine.run(0, 1))
    loads = []
    for _ in range(80):
        load = engine.run(limit.value, 25)
        loads.append(load)
        limit.update(len(engine.agents), load)
    capacity = min(32, memory)
    settled = loads[40:]
    busy = sum(load.num_running for load in settled) / len(settled)
    waiting = sum(load.num_waiting for load in settled) / len(settled)
    assert busy >= 0.9 * capacity
    assert waiting <= 0.5 * capacity


def test_the_limit_stays_between_its_bounds() -> None:
    def load(running: int, waiting: int, cache_use: float = 0.5) -> EngineLoad:
        return EngineLoad(
            num_seats=16, num_running=running, num_waiting=waiting, cache_use=cache_use
        )

    limit = ConcurrencyLimit(floor=8, ceiling=40)
    assert limit.value == 40
    # As many as there are seats, and few more, before anything is known.
    assert limit.update(0, load(0, 0)) == 18
    for _ in range(20):
        limit.update(limit.value, load(2, 0))
    assert limit.value == 40
    for _ in range(20):
        limit.update(limit.value, load(1, limit.value - 1, 0.95))
    assert limit.value == 8
    limit = ConcurrencyLimit(floor=8, ceiling=40)
    limit.update(0, load(0, 0))
    # A publication holds all calls: that says nothing of the memory.
    assert limit.update(18, load(0, 18, 0.95)) == 18
    assert limit.update(18, load(16, 2, 0.9)) == 17
    limit.value = 8
    # Nothing runs, or nobody calls: nothing is known.
    assert limit.update(0, load(0, 0)) == 8
    # A probe is sampled, between two steps.
    assert limit.update(0, load(1, 0)) == 8
    assert limit.update(5, load(0, 0)) == 8


def test_calls_that_came_since_the_last_step_wait_for_no_memory() -> None:
    limit = ConcurrencyLimit(floor=1, ceiling=100)
    load = EngineLoad(num_seats=64, num_running=10, num_waiting=20, cache_use=0.1)
    for _ in range(20):
        limit.update(30, load)
    assert limit.value >= 64


def test_calls_that_wait_for_memory_make_room() -> None:
    limit = ConcurrencyLimit(floor=1, ceiling=500)
    full = EngineLoad(num_seats=100, num_running=60, num_waiting=50, cache_use=1.0)
    before = limit.update(0, replace(full, num_running=0, num_waiting=0))
    assert before in (110, 111)
    assert limit.update(before, full) < before


class LoadedEngine:
    """Says how busy it is: every trajectory is in a call, or none of them is."""

    def __init__(self) -> None:
        self.num_seats = 4
        self.num_running = 0
        self.share = 0.0
        self.num_readings = 0

    async def read_load(self) -> EngineLoad | None:
        self.num_readings += 1
        if self.num_readings % 3 == 2:
            return None
        num_calls = math.ceil(self.share * self.num_running)
        return EngineLoad(
            num_seats=self.num_seats,
            num_running=min(num_calls, self.num_seats),
            num_waiting=max(0, num_calls - self.num_seats),
            cache_use=0.5,
        )


class Waiting(RolloutWorkflow):
    """Trajectories that last until they are told to end."""

    def __init__(self, engine: LoadedEngine) -> None:
        self.engine = engine
        self.may_end = asyncio.Semaphore(0)

    async def arun_episode(self, engine: Any, data: Any) -> dict[str, Any]:
        raise AssertionError("the pool calls arun_trajectory")

    async def arun_trajectory(self, engine: Any, attempt: Attempt) -> Trajectory:
        self.engine.num_running += 1
        await self.may_end.acquire()
        self.engine.num_running -= 1
        return attempt.begin_trajectory()


async def test_the_pool_lets_in_as_many_as_keep_the_engine_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_pool, "_UPDATE_SECONDS", 0.001)
    engine = LoadedEngine()
    workflow, ended = Waiting(engine), list[Trajectory]()
    pool = TrajectoryPool(workflow, engine, ended.append, max_concurrent=30, min_concurrent=3)  # type: ignore[arg-type]
    tasks = [Attempt(task=task) for task in build_eval_tasks([{}] * 100)]

    async def feed() -> None:
        for attempt in tasks:
            await pool.start(attempt)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.002)

    feeding = asyncio.create_task(feed())
    # Four seats, and few calls more than that; nobody knows yet what agents do between calls.
    await until(lambda: engine.num_readings > 5)
    assert engine.num_running == pool.limit.value == 5
    # Each is in a call for a fifth of its time.
    engine.share = 0.2
    await until(lambda: engine.num_running >= 20)
    # All of them are: what runs ends, and no more is started than the floor at last.
    engine.share = 1.0
    for _ in range(70):
        workflow.may_end.release()
        await asyncio.sleep(0.002)
    await until(lambda: engine.num_running <= 6)
    assert pool.limit.value <= 6
    feeding.cancel()
    await pool.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_fixed_number_asks_for_no_load() -> None:
    workflow = Waiting(LoadedEngine())
    pool = TrajectoryPool(workflow, None, lambda _: None, max_concurrent=2, min_concurrent=2)  # type: ignore[arg-type]
    for task in build_eval_tasks([{}] * 2):
        await pool.start(Attempt(task=task))
    waiting = asyncio.create_task(pool.wait_for_room())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    # Whoever waits is told of a mistake.
    pool.fail(ValueError("x"))
    await asyncio.wait_for(waiting, 5)
    await pool.close()


class Failing(RolloutWorkflow):
    """Trajectories that fail as often as their row says, and then work."""

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure = failure or Failure(boundary=Boundary.ENGINE, kind="EngineError", message="m")
        self.num_tries: Counter[str] = Counter()

    async def arun_episode(self, engine: Any, data: Any) -> dict[str, Any]:
        raise AssertionError("the pool calls arun_trajectory")

    async def arun_trajectory(self, engine: Any, attempt: Attempt) -> Trajectory:
        self.num_tries[attempt.id] += 1
        number = self.num_tries[attempt.id]
        assert [i.id for i in attempt.earlier] == [f"call of try {number - 1}"] * (number > 1)
        fails = number <= attempt.task.row["num_failures"]
        return attempt.begin_trajectory(
            interactions=(Interaction(id=f"call of try {number}"),),
            failure=self.failure if fails else None,
        )


async def run_failing(workflow: Failing, nums_failures: list[int]) -> list[bool]:
    """Whether each worked in the end; one after the other, each with at most two retries."""
    ended: list[Trajectory] = []
    pool = TrajectoryPool(workflow, None, ended.append, max_concurrent=1, max_retries=2)  # type: ignore[arg-type]
    for task in build_eval_tasks([{"num_failures": num} for num in nums_failures]):
        await pool.start(Attempt(task=task))
    await pool.drain()
    assert pool.take_num_retries() == workflow.num_tries.total() - len(nums_failures)
    assert pool.take_num_retries() == 0
    await pool.close()
    return [t.failure is None for t in ended]


async def test_what_failed_through_its_surroundings_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_pool, "_FIRST_PAUSE_SECONDS", 0.001)
    workflow = Failing()
    assert await run_failing(workflow, [0, 1, 2, 3]) == [True, True, True, False]
    assert [*workflow.num_tries.values()] == [1, 2, 3, 3]


async def test_nothing_is_made_again_while_nothing_has_worked() -> None:
    workflow = Failing()
    assert await run_failing(workflow, [9, 9]) == [False, False]
    assert workflow.num_tries.total() == 2


@pytest.mark.parametrize(
    "change", [{"boundary": Boundary.TIMEOUT}, {"cause": FailureCause.POLICY}], ids=str
)
async def test_what_would_fail_again_is_an_outcome(change: dict[str, Any]) -> None:
    failure = Failure(boundary=Boundary.AGENT, kind="E", message="m")
    workflow = Failing(replace(failure, **change))
    assert await run_failing(workflow, [0, 1]) == [True, False]
    assert workflow.num_tries.total() == 2
