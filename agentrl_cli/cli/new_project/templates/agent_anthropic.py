"""The agent: a loop on Anthropic's SDK. Nothing in it knows that it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anthropic import AsyncAnthropic
from calculator import SCHEMA, SYSTEM_PROMPT, call_tool

TOOL: Any = {
    "name": SCHEMA["name"],
    "description": SCHEMA["description"],
    "input_schema": SCHEMA["parameters"],
    "strict": SCHEMA["strict"],
}


def build_agent() -> Any:
    """What train.yaml names: agentrl calls the function that it returns on every row."""
    return solve


async def solve(
    data: Mapping[str, Any], anthropic_client: AsyncAnthropic, model: str, max_turns: int
) -> str:
    """The answer to one row; the model may call the tool first, as often as it wants."""
    messages: list[Any] = [{"role": "user", "content": data["question"]}]
    for _ in range(max_turns):
        reply = await anthropic_client.messages.create(
            model=model, max_tokens=1024, system=SYSTEM_PROMPT, tools=[TOOL], messages=messages
        )
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": call_tool(block.name, block.input),
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "assistant", "content": reply.content})
        messages.append({"role": "user", "content": results})
    return ""
