"""The number of trajectories follows the engine's load, on a simulated engine."""

from __future__ import annotations

import random

import pytest

from agentrl_cli.engine.protocol import EngineLoad
from agentrl_cli.rollout.concurrency import ConcurrencyLimit


class Simulation:
    """Agents that call the model and use tools in turns; seats, and memory for so many calls."""

    def __init__(self, *, seats: int, memory: int, call_steps: int, tool_steps: int) -> None:
        self.seats, self.memory = seats, memory
        self.call_steps, self.tool_steps = call_steps, tool_steps
        self.chance = random.Random(3)
        self.agents: list[list[int]] = []
        """For each agent: is it at a tool (1), waiting (2) or running (3), and the steps left."""
        self.num_preempted = 0

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
            num_preemptions=0,
        )

    def _draw(self, mean: int) -> int:
        return max(1, round(self.chance.expovariate(1 / mean))) if mean else 0


@pytest.mark.parametrize("memory", [1000, 24])
@pytest.mark.parametrize(("call_steps", "tool_steps"), [(20, 0), (20, 20), (10, 90)])
def test_the_seats_are_filled_and_few_calls_wait(
    memory: int, call_steps: int, tool_steps: int
) -> None:
    engine = Simulation(seats=32, memory=memory, call_steps=call_steps, tool_steps=tool_steps)
    limit = ConcurrencyLimit.for_seats(32, floor=4, ceiling=2000)
    loads = []
    for _ in range(80):
        load = engine.run(limit.value, 25)
        loads.append(load)
        limit.update(len(engine.agents), load, 0)
    capacity = min(32, memory)
    settled = loads[40:]
    busy = sum(load.num_running for load in settled) / len(settled)
    waiting = sum(load.num_waiting for load in settled) / len(settled)
    assert busy >= 0.9 * capacity
    assert waiting <= 0.5 * capacity


def test_the_limit_stays_between_its_bounds() -> None:
    def load(running: int, waiting: int) -> EngineLoad:
        return EngineLoad(
            num_seats=16,
            num_running=running,
            num_waiting=waiting,
            cache_use=0.5,
            num_preemptions=0,
        )

    limit = ConcurrencyLimit.for_seats(16, floor=8, ceiling=40)
    assert limit.value == 18
    for _ in range(20):
        limit.update(limit.value, load(2, 0), 0)
    assert limit.value == 40
    for _ in range(20):
        limit.update(limit.value, load(1, limit.value - 1), 0)
    assert limit.value == 8
    # Nothing runs, or nobody calls: nothing is known.
    assert limit.update(0, load(0, 0), 0) == 8
    assert limit.update(5, load(0, 0), 0) == 8


def test_preempted_calls_make_room() -> None:
    limit = ConcurrencyLimit.for_seats(100, floor=1, ceiling=500)
    full = EngineLoad(
        num_seats=100, num_running=60, num_waiting=50, cache_use=1.0, num_preemptions=9
    )
    before = limit.value
    assert limit.update(before, full, num_preempted=9) < before
