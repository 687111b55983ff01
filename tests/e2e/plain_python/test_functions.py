"""Functions on OpenAI's SDK, async and blocking: the examples, rewards, deadlines, many at once."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from agentrl_cli.records import Boundary, InteractionStatus
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from builders.plain_agent import build_async_agent, build_blocking_agent

CALL = '{"expression": "20 + 22"}'


@pytest.mark.parametrize("builder", [build_async_agent, build_blocking_agent])
async def test_the_example_agents_work(play_agent, tool_call, builder):
    call = tool_call("calculate", CALL)
    wrong = tool_call("calculate", '{"formula": "1"}')
    played = await play_agent(builder, wrong, call, "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    assert "error: calculate() got an unexpected" in played.prompts[1]
    assert played.prefix_mismatches == []


async def test_a_turn_that_is_continued_twice_is_trained_once(play_agent):
    async def solve(data, client, model):
        asked = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model=model, messages=asked)
        asked += [reply.choices[0].message, {"role": "user", "content": "Sure?"}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=model, messages=asked)
        return reply.choices[0].message.content

    played = await play_agent(lambda: solve, "41", "It is.", "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    first, *later = played.trajectory.interactions
    assert [i.parent_id for i in later] == [first.id] * 2


async def test_a_blocking_agent_rewards_its_own_calls(play_agent):
    def solve(data, client, model):
        asked = [{"role": "user", "content": data["question"]}]
        first = client.chat.completions.create(model=model, messages=asked)
        second = client.chat.completions.create(model=model, messages=asked)
        client.set_reward(first.id, 0.25)
        client.set_final_reward(0.75)
        assert [i.id for i in client.interactions] == [first.id, second.id]

    played = await play_agent(lambda: solve, "41", "42")
    assert played.trajectory.failure is None
    assert [i.reward for i in played.trajectory.interactions] == [0.25, 0.75]


async def test_a_blocking_agent_that_passes_its_deadline_is_cut_off(play_agent):
    """Its thread goes on, but its call ends, and no later one is answered."""
    ended = threading.Event()
    errors = []

    def solve(data, client, model):
        for _ in range(2):
            try:
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "?"}]
                )
            except Exception as error:
                errors.append(error.__cause__ or error)
                time.sleep(1.0)
        ended.set()

    async def never(prompt):
        await asyncio.sleep(60)

    played = await play_agent(lambda: solve, never, "too late", timeout_seconds=0.3)
    failure = played.trajectory.failure
    assert failure.boundary is Boundary.TIMEOUT
    assert [i.status for i in played.trajectory.interactions] == [InteractionStatus.CANCELLED]
    assert await asyncio.to_thread(ended.wait, 30)
    # The call in flight is refused for its time, or cut off; the next one is refused.
    first, second = (type(error).__name__ for error in errors)
    assert first in ("BadRequestError", "AuthenticationError")
    assert second == "AuthenticationError"
    assert played.engine.sampled == []


async def test_sixteen_blocking_agents_wait_at_the_same_time(make_agent_workflow, scripted_engine):
    gate = threading.Barrier(16, timeout=20)

    def solve(data, client, model):
        gate.wait()
        asked = [{"role": "user", "content": f"Say {data['number']}."}]
        reply = client.chat.completions.create(model=model, messages=asked)
        gate.wait()
        return float(reply.choices[0].message.content == data["number"])

    engine = scripted_engine(lambda prompt: prompt.split("Say ")[1].split(".")[0])
    rows = [{"number": str(n)} for n in range(16)]
    trajectories = await run_tasks(
        make_agent_workflow(lambda: solve), engine, build_eval_tasks(rows),
        n_samples=1, max_concurrent=16,
    )  # fmt: skip
    assert [t.failure for t in trajectories] == [None] * 16
    assert [t.reward for t in trajectories] == [1.0] * 16
