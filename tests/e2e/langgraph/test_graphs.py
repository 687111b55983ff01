"""Graphs of the real LangGraph on exact conversations: every token accounted for."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from agentrl_cli import build_chat_model
from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.errors import BuilderError, EngineError
from agentrl_cli.records import Boundary, StopReason
from agentrl_cli.tracking.credit import build_sequences
from builders.langgraph_agent import build_calculator_graph

pytestmark = [
    pytest.mark.langgraph,
    # LangGraph 1 points to LangChain's agents, which are another package.
    pytest.mark.filterwarnings("ignore:create_react_agent has been moved"),
]


@tool
def divide() -> str:
    """Divides."""
    raise ZeroDivisionError("by nought")


def do_nothing(state):
    return {}


def build_react(tools, **options):
    from langgraph.prebuilt import create_react_agent

    def build(client, model):
        return create_react_agent(build_chat_model(client, model), tools, **options)

    return build


async def test_the_ready_made_agent_runs_as_it_is(play_agent, tool_call):
    @tool
    def look_up(word: str) -> str:
        """The meaning of a word."""
        return f"{word} is 42"

    calls = [tool_call("look_up", '{"word": "answer"}')] * 5
    # Named, it sends its name with every turn of its own.
    agent = build_react([look_up], prompt="Be brief.", name="helper")
    played = await play_agent(agent, *calls, "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    assert "Be brief." in played.prompts[0]
    assert "answer is 42" in played.prompts[1]
    assert played.prefix_mismatches == []
    assert len(build_sequences(played.trajectory.interactions, "concat")) == 1


async def test_branches_that_run_in_parallel_are_gathered(play_agent):
    def build(client, model):
        chat_model = build_chat_model(client, model)

        async def ask(state):
            return {"messages": [await chat_model.ainvoke(state["messages"])]}

        def send(state):
            return [Send("part", {"messages": [*state["messages"], ("user", p)]}) for p in "ab"]

        graph = StateGraph(MessagesState)
        for name in ("one", "other", "plan", "part", "join"):
            graph.add_node(name, ask)
        graph.add_edge(START, "one")
        graph.add_edge(START, "other")
        graph.add_edge(["one", "other"], "plan")
        graph.add_conditional_edges("plan", send, ["part"])
        graph.add_edge("part", "join")
        return graph.compile()

    played = await play_agent(build, "40", "41", "plan", "1", "2", "42")
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.num_turns, trajectory.final_answer) == (None, 6, "42")
    assert played.prefix_mismatches == []


async def test_a_raising_tool_ends_the_trajectory_at_the_tool(play_agent, tool_call):
    played = await play_agent(build_react([divide]), tool_call("divide", "{}"))
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.TOOL, "ZeroDivisionError")
    assert (played.trajectory.num_turns, played.trajectory.reward) == (1, None)


async def test_arguments_that_a_tool_refuses_are_the_policys_failure(play_agent, tool_call):
    from langgraph.prebuilt import ToolNode

    @tool
    def double(number: int) -> int:
        """Twice the number."""
        return 2 * number

    call = tool_call("double", '{"number": "many"}')
    strict = ToolNode([double], handle_tool_errors=False)
    played = await play_agent(build_react(strict), call)
    assert played.trajectory.failure.kind in ("ToolInvocationError", "ValidationError")
    assert (played.trajectory.is_policy_failure, played.trajectory.reward) == (True, 0.0)


async def test_an_engine_error_is_the_engines_failure(play_agent):
    played = await play_agent(build_react([divide]), EngineError("out of memory"))
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.ENGINE, "EngineError")


async def test_turns_are_limited_by_the_budget(play_agent, tool_call):
    @tool
    def again() -> str:
        """Once more."""
        return "more"

    played = await play_agent(build_react([again]), *[tool_call("again", "{}")] * 4, max_turns=3)
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.stop_reason) == (None, StopReason.MAX_TURNS)
    assert (trajectory.num_turns, trajectory.reward) == (3, 0.0)


async def test_a_graph_without_end_is_a_budget_too(play_agent):
    def build(client, model):
        graph = StateGraph(MessagesState)
        graph.add_node("idle", do_nothing)
        graph.add_edge(START, "idle")
        graph.add_edge("idle", "idle")
        return graph.compile().with_config(recursion_limit=5)

    played = await play_agent(build)
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.BUDGET, "GraphRecursionError")


async def test_blocking_nodes_and_checkpoints_work(play_agent):
    def build(client, model):
        chat_model = build_chat_model(client, model)

        def ask(state: MessagesState):
            return {"messages": [chat_model.invoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("ask", ask)
        graph.add_node("ask_again", ask)
        graph.add_edge(START, "ask")
        graph.add_edge("ask", "ask_again")
        return graph.compile(checkpointer=InMemorySaver())

    played = await play_agent(build, "41", "42")
    trajectory = played.trajectory
    assert (trajectory.failure, trajectory.final_answer, trajectory.num_turns) == (None, "42", 2)


async def test_a_function_that_blocks_invokes_a_graph(play_agent, tool_call):
    @tool
    def look_up(word: str) -> str:
        """The meaning of a word."""
        return f"{word} is 42"

    def solve(data, client, model):
        graph = build_react([look_up])(client, model)
        if data["question"] == "wrong":
            return asyncio.run(graph.ainvoke({"messages": [("user", "?")]}))
        state = graph.invoke({"messages": [("user", data["question"])]})
        return state["messages"][-1].content

    call = tool_call("look_up", '{"word": "answer"}')
    played = await play_agent(lambda: solve, call, "42")
    assert (played.trajectory.failure, played.trajectory.final_answer) == (None, "42")
    assert played.prefix_mismatches == []
    played = await play_agent(lambda: solve, row={"question": "wrong", "answer": "42"})
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.AGENT, "BlockingCallError")
    assert "write the function as async def" in failure.message


def test_graphs_that_cannot_be_asked_are_refused():
    class State(TypedDict):
        question: str

    def without_messages(client):
        graph = StateGraph(State)
        graph.add_node("n", do_nothing)
        graph.add_edge(START, "n")
        return graph.compile()

    with pytest.raises(BuilderError, match=r"state has no 'messages' \(it has question\)"):
        AgentSource(without_messages, {}, "k")
    with pytest.raises(BuilderError, match=r"delivery='slow'.*allowed are whole and streamed"):
        AgentSource(build_calculator_graph, {"delivery": "slow"}, "k")
