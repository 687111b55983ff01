"""Conversations in which the library is searched as it should be, for ``agentrl sft``."""

from __future__ import annotations

import json
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from examples.search.agent import SYSTEM, search
from examples.search.corpus import find_text
from examples.search.tasks import build_rows


def build_demonstrations(num_rows: int = 26) -> list[dict[str, Any]]:
    """One conversation for each of the first training tasks."""
    tools = [convert_to_openai_tool(search)]
    return [{"messages": _converse(row), "tools": tools} for row in build_rows("train")[:num_rows]]


def _converse(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": row["question"]},
    ]
    for number, query in enumerate(row["queries"]):
        call = {"name": "search", "arguments": json.dumps({"query": query})}
        calls = [{"id": f"call_{number}", "type": "function", "function": call}]
        messages += [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"call_{number}", "content": find_text(query)},
        ]
    return [*messages, {"role": "assistant", "content": row["answer"]}]
