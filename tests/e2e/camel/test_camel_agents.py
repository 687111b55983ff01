"""Agents of the real CAMEL on exact conversations: every token accounted for."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("camel")

from camel.agents import ChatAgent, TaskPlannerAgent
from camel.societies import RolePlaying

from agentrl_cli import TrackedCamelModel
from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.agents.camel_model import CharacterCounter
from agentrl_cli.errors import BuilderError, EngineError
from agentrl_cli.records import Boundary
from builders.camel_agent import build_chat_agent, build_planner_team, build_role_playing

pytestmark = [
    pytest.mark.camel,
    # CAMEL's advice about the example's tool, whose schema the built-in model was made for.
    pytest.mark.filterwarnings("ignore:Parameter description is missing:UserWarning"),
]

EXPRESSIONS = ('{"expression": "20 + 22"}', '{"expression": "21 * 2"}')


async def test_streamed_turns_without_text_beside_their_calls_are_one_sequence(
    play_agent, tool_call
):
    """With text there they break: see the matrix."""
    first, second = (tool_call("calculate", e) for e in EXPRESSIONS)
    played = await play_agent(
        build_chat_agent, first, f"{first}\n{second}", "It is 42.", kwargs={"delivery": "streamed"}
    )
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward, trajectory.num_turns) == (None, 1.0, 3)
    assert all(i.extends_parent for i in trajectory.interactions[1:])
    assert played.prefix_mismatches == []


async def test_a_raising_tool_is_told_to_the_model(play_agent, tool_call):
    def divide() -> str:
        """Divides."""
        raise ZeroDivisionError("by nought")

    def build(client, model):
        return ChatAgent("x", model=TrackedCamelModel(client, model), tools=[divide])

    played = await play_agent(build, tool_call("divide", "{}"), tool_call("no_tool", "{}"), "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    assert "Error executing async tool 'divide': by nought" in played.prompts[1]
    assert "Tool 'no_tool' not found in registered tools" in played.prompts[2]
    assert played.prefix_mismatches == []


@pytest.mark.parametrize("delivery", ["whole", "streamed"])
async def test_an_engine_error_is_the_engines_failure_also_where_camel_makes_it_text(
    play_agent, delivery
):
    played = await play_agent(
        build_chat_agent, EngineError("out of memory"), kwargs={"delivery": delivery}
    )
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.ENGINE, "EngineError")
    assert (played.trajectory.reward, played.trajectory.num_turns) == (None, 0)


async def test_a_planner_and_a_solver_share_the_outcome(play_agent, tool_call):
    call = tool_call("calculate", EXPRESSIONS[0])
    played = await play_agent(build_planner_team, "1. Add them.", call, "#### 42")
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward, trajectory.num_turns) == (None, 1.0, 3)
    plan, solve, answer = trajectory.interactions
    assert "You are a helpful task planner." in played.prompts[0]
    assert "Plan:\n1. Add them." in played.prompts[1]
    # The plan is a conversation of its own: it hands over to the first call after it.
    assert (plan.parent_id, solve.parent_id, answer.parent_id) == (None, None, solve.id)
    assert [i.reward for i in trajectory.interactions] == [None, None, 1.0]
    assert played.prefix_mismatches == []


async def test_credit_fades_from_the_answer_to_the_plan(play_agent, tool_call):
    call = tool_call("calculate", EXPRESSIONS[0])
    played = await play_agent(
        build_planner_team, "1. Add them.", call, "#### 42", turn_discount=0.5
    )
    assert [i.turn_return for i in played.trajectory.interactions] == [0.25, 0.5, 1.0]


async def test_a_planner_that_is_the_agent_gets_its_own_prompt(play_agent):
    def build(client, model):
        return TaskPlannerAgent(model=TrackedCamelModel(client, model))

    played = await play_agent(build, "42 steps")
    assert played.trajectory.final_answer == "42 steps"
    assert "Divide this task into subtasks: What is 20 + 22?" in played.prompts[0]


async def test_two_players_talk_until_the_task_is_done(play_agent, tool_call):
    call = tool_call("calculate", EXPRESSIONS[0])
    played = await play_agent(
        build_role_playing,
        "Instruction: add 20 and 22.",
        call,
        "Solution: 42. Next request.",
        "<CAMEL_TASK_DONE>",
        "Well done: 42.",
        turn_discount=0.5,
    )
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.reward, trajectory.num_turns) == (None, 1.0, 5)
    assert trajectory.final_answer == "Well done: 42."
    user_1, tool_1, assistant_1, user_2, assistant_2 = trajectory.interactions
    # Two conversations, interleaved on one client, each unbroken.
    assert (user_1.parent_id, user_2.parent_id) == (None, user_1.id)
    assert (tool_1.parent_id, assistant_1.parent_id, assistant_2.parent_id) == (
        None, tool_1.id, assistant_1.id,
    )  # fmt: skip
    assert played.prefix_mismatches == []
    assert "What is 20 + 22?" in played.prompts[0]
    # The student's last word hands over to the call after it; the rest follows the tree.
    returns = {i.id: i.turn_return for i in trajectory.interactions}
    assert returns == {
        assistant_2.id: 1.0, assistant_1.id: 0.5, tool_1.id: 0.25, user_2.id: 0.5, user_1.id: 0.25,
    }  # fmt: skip


async def test_a_play_ends_after_half_the_turns(play_agent):
    played = await play_agent(build_role_playing, *["Go on.", "42."] * 2, max_turns=4)
    assert (played.trajectory.failure, played.trajectory.num_turns) == (None, 4)
    assert played.trajectory.final_answer == "42."


async def test_messages_of_a_row_become_the_agents_history(play_agent):
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hello yourself."},
            {"role": "user", "content": "What is 20 + 22?"},
        ],
        "answer": "42",
    }
    played = await play_agent(build_chat_agent, "42", row=row)
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    (prompt,) = played.prompts
    places = [prompt.index(m["content"]) for m in row["messages"]]
    assert places == sorted(places)


async def test_a_step_that_blocks_works_in_a_thread_and_is_refused_on_the_loop(play_agent):
    class Blocking:
        async def run(self, data, client, model):
            agent = ChatAgent("x", model=TrackedCamelModel(client, model))
            if data["question"] == "wrong":
                return agent.step(data["question"]).msgs[0].content
            response = await asyncio.to_thread(agent.step, data["question"])
            return response.msgs[0].content

    played = await play_agent(Blocking, "42")
    assert (played.trajectory.failure, played.trajectory.final_answer) == (None, "42")
    played = await play_agent(Blocking, row={"question": "wrong", "answer": "42"})
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.AGENT, "BlockingCallError")
    assert "await asyncio.to_thread(function, ...)" in failure.message


async def test_a_function_that_blocks_steps_an_agent(play_agent, tool_call):
    def solve(data, client, model):
        agent = build_chat_agent(client, model)
        return agent.step(data["question"]).msgs[0].content

    call = tool_call("calculate", EXPRESSIONS[0])
    played = await play_agent(lambda: solve, call, "42")
    assert (played.trajectory.failure, played.trajectory.final_answer) == (None, "42")
    assert played.prefix_mismatches == []


def test_agents_that_would_not_be_recorded_are_refused(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "nobody's")

    def untracked(client):
        from camel.models import StubModel

        return ChatAgent("x", model=StubModel("stub"))

    with pytest.raises(BuilderError, match=r"ChatAgent speaks to StubModel.*TrackedCamelModel"):
        AgentSource(untracked, {}, "agent_builder_path")


def test_roles_can_be_played_only_by_tracked_agents():
    from camel.models import StubModel

    def half_tracked(client, model):
        return RolePlaying(
            "Mathematician",
            "Student",
            with_task_specify=False,
            assistant_agent_kwargs={"model": TrackedCamelModel(client, model)},
            user_agent_kwargs={"model": StubModel("stub")},
        )

    with pytest.raises(BuilderError, match="speaks to StubModel"):
        AgentSource(half_tracked, {}, "agent_builder_path")


def test_the_counter_gives_every_text_back():
    counter = CharacterCounter()
    for text in ("", "a", "abcd", "abcdefghi", "Grüße 日本語 🙂🙃"):
        assert counter.decode(counter.encode(text)) == text
    assert len(counter.encode("abcdefghi")) == 3
    assert counter.count_tokens_from_messages([{"content": "abcdefgh"}, {"content": None}]) == 2
