"""Agents in plain Python on OpenAI's client: async, and blocking; and rows that choose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT, build_rows
from builders.calculator_agent import calculate

#: As the SDK's types do not know a schema that is plain data.
_TOOLS: list[Any] = [CALCULATE_TOOL]


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str, max_turns: int) -> str:
    """Answers with a number, and calls ``calculate`` as often as the model wants."""
    messages = _begin(data)
    for _ in range(max_turns):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=_TOOLS
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        messages += [_call_tool(call) for call in message.tool_calls]
    return ""


def solve_blocking(data: Mapping[str, Any], client: OpenAI, model: str, max_turns: int) -> str:
    """The same with a client that blocks; runs in a thread of its own."""
    messages = _begin(data)
    for _ in range(max_turns):
        completion = client.chat.completions.create(model=model, messages=messages, tools=_TOOLS)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        messages += [_call_tool(call) for call in message.tool_calls]
    return ""


def build_async_agent() -> Any:
    """The async one."""
    return solve


def build_blocking_agent() -> Any:
    """The one that blocks."""
    return solve_blocking


def build_mixed_rows(split: str = "train") -> list[dict[str, Any]]:
    """The calculator's tasks, every other one for the agent that blocks."""
    names = ("async", "blocking")
    return [{**row, "agent_name": names[n % 2]} for n, row in enumerate(build_rows(split))]


def _begin(data: Mapping[str, Any]) -> list[Any]:
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": data["question"]},
    ]


def _call_tool(call: Any) -> dict[str, Any]:
    """The tool's answer; what is wrong with the call is told to the model."""
    try:
        result = calculate(**json.loads(call.function.arguments))
    except (TypeError, ValueError) as error:
        result = f"error: {error}"
    return {"role": "tool", "tool_call_id": call.id, "content": result}
