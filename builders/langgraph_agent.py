"""Graphs of LangGraph: a ready-made tool agent, and one whose nodes are written out."""

from __future__ import annotations

from typing import Any, Literal

from langchain_core.messages import SystemMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import AsyncOpenAI

from agentrl_cli import GraphRun, build_chat_model
from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from builders.calculator_agent import calculate


def build_calculator_graph(
    client: AsyncOpenAI,
    model: str,
    delivery: Literal["whole", "streamed"] = "whole",
    api: Literal["chat", "responses"] = "chat",
) -> GraphRun:
    """A graph that answers with a number and may call ``calculate``.

    The tool's schema is written out because the built-in model knows no other; for another
    model, ``bind_tools([calculate])`` is enough, or the whole is
    ``create_react_agent(build_chat_model(client, model), [calculate])``.
    """
    chat_model = build_chat_model(client, model, use_responses_api=api == "responses")
    with_tool = chat_model.bind_tools([CALCULATE_TOOL])

    async def answer(state: MessagesState) -> dict[str, Any]:
        asked = [SystemMessage(SYSTEM_PROMPT), *state["messages"]]
        return {"messages": [await with_tool.ainvoke(asked)]}

    def choose_next(state: MessagesState) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([StructuredTool.from_function(calculate)]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", choose_next, ["tools", END])
    graph.add_edge("tools", "answer")
    return GraphRun(graph.compile(), delivery)
