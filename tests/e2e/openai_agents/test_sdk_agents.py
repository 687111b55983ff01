"""Agents of the real OpenAI Agents SDK on exact conversations: every token accounted for."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    function_tool,
    set_trace_processors,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from agentrl_cli.records import Boundary, StopReason
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.tracking.credit import build_sequences
from builders.math_agent import build_math_agent

pytestmark = pytest.mark.openai_agents


@pytest.fixture
def play(play_agent):
    """Runs one trajectory of an agent whose model replies as given."""

    async def run(agent, *replies, **options):
        played = await play_agent(lambda: agent, *replies, **options)
        assert len(asyncio.all_tasks()) == 1
        return played.trajectory, played.engine

    return run


async def test_a_tool_turn_and_the_answer_are_one_sequence(play, tool_call):
    call = tool_call("calculate", '{"expression": "20 + 22"}')
    trajectory, engine = await play(build_math_agent(), call, "It is\n#### 42")
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "It is\n#### 42")
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (2, 1)
    assert "<tool_response>\n42\n</tool_response>" in engine.prompts[1]
    (sequence,) = build_sequences(trajectory.interactions, "concat")
    assert len(sequence.spans) == 2
    assert [i.turn_return for i in trajectory.interactions] == [1.0, 1.0]
    # The SDK's defaults for OpenAI's own models were not sent on.
    assert engine.samplings[0].max_tokens == 1024


async def test_parallel_tool_calls_are_answered_in_one_turn(play, tool_call):
    calls = "\n".join(tool_call("calculate", f'{{"expression": "{n} + 1"}}') for n in (1, 2))
    trajectory, engine = await play(build_math_agent(), calls, "#### 42")
    assert (trajectory.failure, trajectory.num_tool_calls) == (None, 2)
    assert "<tool_response>\n2\n</tool_response>" in engine.prompts[1]
    assert "<tool_response>\n3\n</tool_response>" in engine.prompts[1]
    assert len(build_sequences(trajectory.interactions, "concat")) == 1


class Solution(BaseModel):
    steps: list[str]
    number: int


async def test_structured_output_is_the_answer_as_json(play):
    agent = Agent(name="structured", instructions="JSON.", output_type=Solution)
    reply = json.dumps({"steps": ["20 + 22"], "number": 42})
    trajectory, _ = await play(agent, reply)
    assert trajectory.failure is None
    assert json.loads(trajectory.final_answer) == {"steps": ["20 + 22"], "number": 42}
    assert trajectory.reward == 1.0


async def test_malformed_structured_output_is_the_policys_failure(play):
    agent = Agent(name="structured", instructions="JSON.", output_type=Solution)
    trajectory, _ = await play(agent, "no json")
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (
        Boundary.AGENT, "ModelBehaviorError",
    )  # fmt: skip
    assert trajectory.is_policy_failure
    assert (trajectory.num_turns, trajectory.reward) == (1, 0.0)


async def test_too_many_turns_end_the_agent_and_it_is_judged_by_what_it_said(play, tool_call):
    call = tool_call("calculate", '{"expression": "1 + 1"}')
    trajectory, _ = await play(build_math_agent(), *[call] * 9, max_turns=3)
    assert (trajectory.failure, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert (trajectory.num_turns, trajectory.reward) == (3, 0.0)


async def test_the_budget_counts_the_calls_of_sub_agents_too(play, tool_call):
    helper = Agent(name="helper", instructions="You add.")
    agent = Agent(name="boss", instructions="You delegate.", tools=[helper.as_tool("ask", "Adds")])
    call = tool_call("ask", '{"input": "1"}')
    trajectory, _ = await play(agent, call, "2", call, "2", call, "2", max_turns=4)
    assert (trajectory.failure, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert trajectory.num_turns == 4


async def test_a_raising_tool_tells_the_model_or_ends_the_trajectory(play, tool_call):
    def divide() -> str:
        """Divides."""
        raise ZeroDivisionError("by nought")

    told = Agent(name="told", instructions="x", tools=[function_tool(divide)])
    trajectory, engine = await play(told, tool_call("divide", "{}"), "#### 42")
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert "<tool_response>\nAn error occurred" in engine.prompts[1]

    strict = function_tool(divide, failure_error_function=None)
    ended = Agent(name="ended", instructions="x", tools=[strict])
    trajectory, _ = await play(ended, tool_call("divide", "{}"))
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (
        Boundary.TOOL, "ZeroDivisionError",
    )  # fmt: skip
    assert 'raise ZeroDivisionError("by nought")' in trajectory.failure.traceback
    assert trajectory.num_turns == 1


@pytest.mark.parametrize("reward", [-1.0, None])
async def test_unknown_tools_in_every_trajectory_are_an_outcome_and_end_no_run(
    make_agent_workflow, scripted_engine, tool_call, reward
):
    helper = Agent(name="helper", instructions="b")
    triage = Agent(name="triage", instructions="a", handoffs=[helper])
    trajectories = await run_tasks(
        make_agent_workflow(lambda: triage, policy_failure_reward=reward),
        scripted_engine(lambda _: tool_call("calculate", "{}")),
        build_eval_tasks([{"question": "20 + 22?", "answer": "42"}]), n_samples=4, max_concurrent=4,
    )  # fmt: skip
    for trajectory in trajectories:
        assert "Tool calculate not found in agent triage" in trajectory.failure.message
        assert trajectory.is_policy_failure
        assert trajectory.reward == trajectory.interactions[0].turn_return == reward


async def test_agents_are_served_whatever_model_they_name(play, tool_call):
    named = Agent(name="named", instructions="b", model="gpt-5.4-mini")
    first = Agent(name="first", instructions="a", model="o3", handoffs=[named])
    trajectory, engine = await play(first, tool_call("transfer_to_named", "{}"), "#### 42")
    assert (trajectory.failure, trajectory.reward, len(engine.prompts)) == (None, 1.0, 2)


async def test_settings_of_the_user_are_kept(play):
    settings = ModelSettings(temperature=0.25, max_tokens=9)
    trajectory, engine = await play(
        Agent(name="cool", instructions="x", model_settings=settings), "#### 42"
    )
    assert trajectory.failure is None
    assert (engine.samplings[0].temperature, engine.samplings[0].max_tokens) == (0.25, 9)


async def test_a_model_object_of_the_users_own_is_left_alone(play):
    elsewhere = AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="x", max_retries=0)
    judge = Agent(
        name="judge",
        instructions="x",
        model=OpenAIChatCompletionsModel("judge", openai_client=elsewhere),
    )
    trajectory, engine = await play(judge)
    assert trajectory.failure.kind == "APIConnectionError"
    assert engine.prompts == []
    await elsewhere.close()


async def test_messages_of_a_row_are_the_input(play):
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 20 + 22?"},
        ],
        "answer": "42",
    }
    trajectory, engine = await play(Agent(name="plain"), "#### 42", row=row)
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)
    assert "Be brief." in engine.prompts[0]


async def test_nothing_is_traced(play):
    class Refusing:
        def on_trace_start(self, trace):
            raise AssertionError("traced")

        on_trace_end = on_span_start = on_span_end = on_trace_start

        def shutdown(self): ...
        def force_flush(self): ...

    set_trace_processors([Refusing()])
    try:
        trajectory, _ = await play(build_math_agent(), "#### 42")
    finally:
        set_trace_processors([])
    assert trajectory.failure is None


async def test_trajectories_that_share_an_agent_do_not_mix(
    make_agent_workflow, scripted_engine, tool_call
):
    """Each is asked for its own number, over a tool turn, eight at a time."""

    def reply(prompt):
        number = prompt.split("exactly ")[1].split("<")[0]
        if "<tool_response>" in prompt:
            assert f"<tool_response>\n{number}\n" in prompt
            return f"#### {number}"
        return tool_call("calculate", f'{{"expression": "{number}"}}')

    rows = [{"question": f"Say exactly {n}", "answer": str(n)} for n in range(100, 112)]
    engine = scripted_engine(reply)
    trajectories = await run_tasks(
        make_agent_workflow(build_math_agent), engine, build_eval_tasks(rows),
        n_samples=2, max_concurrent=8,
    )  # fmt: skip
    assert [t.failure for t in trajectories] == [None] * 24
    assert [t.reward for t in trajectories] == [1.0] * 24
    assert 1 < engine.most_running <= 8
