"""The agent, written with LangGraph. Only its model comes from agentrl."""

from __future__ import annotations

from typing import Any

from calculator import SCHEMA, SYSTEM_PROMPT, calculate
from langchain_core.messages import SystemMessage
from langchain_core.tools import StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from openai import AsyncOpenAI

from agentrl_cli import build_chat_model


def build_agent(client: AsyncOpenAI, model: str) -> Any:
    """What train.yaml names: agentrl runs the graph that it returns on every row.

    The tool's schema is given as it is because the built-in model knows no other; with a real
    model, ``create_react_agent(build_chat_model(client, model), [calculate])`` is enough.
    """
    chat_model = build_chat_model(client, model).bind_tools(
        [{"type": "function", "function": SCHEMA}]
    )

    async def answer(state: MessagesState) -> dict[str, Any]:
        asked = [SystemMessage(SYSTEM_PROMPT), *state["messages"]]
        return {"messages": [await chat_model.ainvoke(asked)]}

    def choose_next(state: MessagesState) -> str:
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else END

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([StructuredTool.from_function(calculate)]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", choose_next, ["tools", END])
    graph.add_edge("tools", "answer")
    return graph.compile()
