"""The agent: a loop in plain Python on OpenAI's client. Nothing in it knows that it is trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from calculator import SCHEMA, SYSTEM_PROMPT, call_tool
from openai import AsyncOpenAI

TOOLS: Any = [{"type": "function", "function": SCHEMA}]


def build_agent() -> Any:
    """What train.yaml names: agentrl calls the function that it returns on every row."""
    return solve


async def solve(data: Mapping[str, Any], client: AsyncOpenAI, model: str, max_turns: int) -> str:
    """The answer to one row; the model may call the tool first, as often as it wants."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": data["question"]},
    ]
    for _ in range(max_turns):
        completion = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = call_tool(call.function.name, _parse(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


def _parse(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return None
