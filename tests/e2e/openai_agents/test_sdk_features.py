"""The SDK's protocols, streams, guardrails, sessions and contexts: every token accounted for."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("agents")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    RunContextWrapper,
    Runner,
    function_tool,
    input_guardrail,
)

from agentrl_cli import AgentRun, build_run_config
from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.errors import BuilderError, EngineError
from agentrl_cli.records import Boundary, InteractionStatus
from builders.math_agent import build_math_team
from builders.openai_features import (
    build_calculator_run,
    build_conversation,
    build_guarded_agent,
)

pytestmark = pytest.mark.openai_agents

CELLS = [(api, delivery) for api in ("chat", "responses") for delivery in ("whole", "streamed")]


@pytest.mark.parametrize(("api", "delivery"), CELLS)
async def test_handoffs_are_credited_through_the_team(play_agent, tool_call, api, delivery):
    played = await play_agent(
        lambda: AgentRun(build_math_team(), api=api, delivery=delivery),
        tool_call("transfer_to_solver", "{}"),
        tool_call("calculate", '{"expression": "20 + 22"}'),
        tool_call("transfer_to_checker", "{}"),
        "Checked.\n#### 42",
        turn_discount=0.5,
    )
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward, trajectory.num_turns) == (None, 1.0, 4)
    triage, solve, hand_over, check = trajectory.interactions
    assert [i.parent_id for i in trajectory.interactions] == [None, None, solve.id, None]
    assert [i.turn_return for i in (check, hand_over, solve, triage)] == [1.0, 0.5, 0.25, 0.125]
    assert played.prefix_mismatches == []


@pytest.mark.parametrize(("api", "delivery"), CELLS)
async def test_a_sub_agent_hands_its_credit_to_the_turn_after_it(
    play_agent, tool_call, api, delivery
):
    def build():
        helper = Agent(name="helper", instructions="You add numbers.")
        ask = helper.as_tool("ask_helper", "Adds numbers")
        boss = Agent(name="boss", instructions="You delegate.", tools=[ask])
        return AgentRun(boss, api=api, delivery=delivery)

    played = await play_agent(
        build, tool_call("ask_helper", '{"input": "20 + 22"}'), "42", "#### 42", turn_discount=0.5
    )
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward, trajectory.num_turns) == (None, 1.0, 3)
    first, helped, last = trajectory.interactions
    assert (first.parent_id, helped.parent_id, last.parent_id) == (None, None, first.id)
    # The boss's call and its helper's both have the last turn as their successor.
    assert [i.turn_return for i in (first, helped, last)] == [0.5, 0.5, 1.0]
    assert played.prefix_mismatches == []


@pytest.mark.parametrize(("api", "delivery"), CELLS)
async def test_failures_cross_the_same_boundary_whatever_the_way(
    play_agent, tool_call, api, delivery
):
    def divide() -> str:
        """Divides."""
        raise ZeroDivisionError("by nought")

    def build():
        tool = function_tool(divide, failure_error_function=None)
        agent = Agent(name="strict", instructions="x", tools=[tool])
        return AgentRun(agent, api=api, delivery=delivery)

    async def fail(*replies, **rollout):
        played = await play_agent(build, *replies, **rollout)
        assert len(asyncio.all_tasks()) == 1
        return (played.trajectory.failure.boundary, played.trajectory.failure.kind)

    assert await fail(tool_call("divide", "{}")) == (Boundary.TOOL, "ZeroDivisionError")
    assert await fail(EngineError("gone")) == (Boundary.ENGINE, "EngineError")
    assert (await fail(tool_call("search", "{}")))[0] is Boundary.AGENT


@pytest.mark.parametrize(("api", "delivery"), CELLS)
async def test_a_reply_that_is_cut_off_is_judged_by_what_it_says(play_agent, api, delivery):
    kwargs = {"api": api, "delivery": delivery}
    played = await play_agent(build_calculator_run, "x" * 40, kwargs=kwargs, max_tokens=5)
    trajectory = played.trajectory
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.interactions[0].finish_reason) == (0.0, "length")
    assert trajectory.final_answer
    assert set(trajectory.final_answer) == {"x"}


async def test_an_output_guardrail_is_an_end_that_is_judged_as_silence(play_agent):
    played = await play_agent(build_guarded_agent, "no number")
    trajectory = played.trajectory
    assert trajectory.failure is None
    assert (trajectory.final_answer, trajectory.reward, trajectory.num_turns) == ("", 0.0, 1)
    assert trajectory.interactions[0].turn_return == 0.0
    played = await play_agent(build_guarded_agent, "42")
    assert (played.trajectory.final_answer, played.trajectory.reward) == ("42", 1.0)


async def test_an_input_guardrail_ends_the_call_that_runs_beside_it(play_agent):
    @input_guardrail
    async def refuse(context, agent, asked) -> GuardrailFunctionOutput:
        await asyncio.sleep(0.05)
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=True)

    def build():
        return Agent(name="guarded", instructions="x", input_guardrails=[refuse])

    async def never(prompt):
        await asyncio.sleep(60)

    played = await play_agent(build, never)
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.final_answer, trajectory.num_turns) == (None, "", 0)
    assert [i.status for i in trajectory.interactions] == [InteractionStatus.CANCELLED]
    # No call was completed that a score could be credited to.
    assert trajectory.reward is None


async def test_a_guardrail_with_an_agent_of_its_own_is_recorded(play_agent):
    """As the SDK's own first pages write it, but for the run configuration."""

    def build(client, model):
        config = build_run_config(client, model)
        judge = Agent(name="judge", instructions="Is it a sum?")

        @input_guardrail(run_in_parallel=False)
        async def refuse(context, agent, asked) -> GuardrailFunctionOutput:
            result = await Runner.run(judge, asked, context=context.context, run_config=config)
            tripped = result.final_output != "yes"
            return GuardrailFunctionOutput(output_info=None, tripwire_triggered=tripped)

        return Agent(name="guarded", instructions="x", input_guardrails=[refuse])

    played = await play_agent(build, "yes", "42")
    assert (played.trajectory.failure, played.trajectory.num_turns) == (None, 2)
    assert [i.turn_return for i in played.trajectory.interactions] == [1.0, 1.0]
    assert "Is it a sum?" in played.prompts[0]


async def test_the_client_of_a_function_that_blocks_is_refused_with_what_to_write(play_agent):
    def solve(data, client, model):
        agent = Agent(name="own", instructions="x")
        config = build_run_config(client, model)
        return Runner.run_sync(agent, data["question"], run_config=config).final_output

    failure = (await play_agent(lambda: solve)).trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.AGENT, "BlockingCallError")
    assert "async def solve(data, client, model)" in failure.message


async def test_a_session_remembers_within_a_trajectory_and_not_beyond(play_agent, tool_call):
    call = tool_call("calculate", '{"expression": "20 + 22"}')
    for _ in range(2):
        played = await play_agent(build_conversation, call, "41", "42")
        trajectory = played.trajectory
        assert (trajectory.failure, trajectory.final_answer) == (None, "42")
        assert all(i.extends_parent for i in trajectory.interactions[1:])
        assert "Are you sure?" in played.prompts[2]
        assert played.prompts[0].count("What is 20 + 22?") == 1
        assert played.prefix_mismatches == []


async def test_the_context_is_made_from_the_row(play_agent, tool_call):
    @function_tool
    def look_up(context: RunContextWrapper[dict]) -> str:
        """What the row knows."""
        return context.context["secret"]

    def build():
        agent = Agent(name="reader", instructions="x", tools=[look_up])
        return AgentRun(agent, build_context=lambda row: {"secret": row["hidden"]})

    row = {"question": "q", "answer": "42", "hidden": "it is 42"}
    played = await play_agent(build, tool_call("look_up", "{}"), "42", row=row)
    assert played.trajectory.failure is None
    assert "it is 42" in played.prompts[1]


async def test_a_function_may_run_the_runner_itself(play_agent, tool_call):
    async def solve(data, client, model):
        agent = Agent(name="own", instructions="x")
        config = build_run_config(client, model, api="responses", workflow_name="mine")
        result = Runner.run_streamed(agent, data["question"], run_config=config)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds
        return result.final_output

    played = await play_agent(lambda: solve, "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)


def test_a_wrong_word_in_the_kwargs_is_named():
    with pytest.raises(BuilderError, match=r"AgentRun\(api='soap'\): allowed are chat and resp"):
        AgentSource(build_calculator_run, {"api": "soap"}, "k")
