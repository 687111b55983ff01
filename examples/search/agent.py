"""A graph of LangGraph that answers from a small library, which it can search."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from openai import AsyncOpenAI

from agentrl_cli import build_chat_model
from examples.search.corpus import find_text

SYSTEM = """\
Search for a name, then answer with the city or country alone. For example, to look up Ida Berg:
<tool_call>
{"name": "search", "arguments": {"query": "Ida Berg"}}
</tool_call>"""


@tool
def search(query: str) -> str:
    """Finds a text about a person or a city."""
    return find_text(query) or "nothing found"


def build_agent(client: AsyncOpenAI, model: str) -> Any:
    """The graph."""
    chat_model = build_chat_model(client, model).bind_tools([search])

    async def answer(state: MessagesState) -> dict[str, Any]:
        asked = [SystemMessage(SYSTEM), *state["messages"]]
        return {"messages": [await chat_model.ainvoke(asked)]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("tools", ToolNode([search]))
    graph.add_edge(START, "answer")
    graph.add_conditional_edges("answer", tools_condition, ["tools", END])
    graph.add_edge("tools", "answer")
    return graph.compile()
