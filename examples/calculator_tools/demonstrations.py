"""Conversations in which the tool is called as it should be, for ``agentrl sft``."""

from __future__ import annotations

import json
import random
from typing import Any

from agents import FunctionTool

from examples.calculator_tools.agent import build_agent, calculate
from examples.calculator_tools.tasks import build_rows


def build_demonstrations(num_rows: int = 12) -> list[dict[str, Any]]:
    """One conversation for each of some training tasks."""
    agent = build_agent()
    [tool] = [tool for tool in agent.tools if isinstance(tool, FunctionTool)]
    schema = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.params_json_schema,
        "strict": tool.strict_json_schema,
    }
    rows = random.Random(0).sample(build_rows("train"), num_rows)
    return [
        {
            "messages": [{"role": "system", "content": agent.instructions}, *_converse(row)],
            "tools": [{"type": "function", "function": schema}],
        }
        for row in rows
    ]


def _converse(row: dict[str, Any]) -> list[dict[str, Any]]:
    arguments = json.dumps({"expression": row["expression"]})
    call = {"name": "calculate", "arguments": arguments}
    return [
        {"role": "user", "content": row["question"]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "call_1", "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": calculate(row["expression"])},
        {"role": "assistant", "content": row["answer"]},
    ]
