"""The calculator agent as a tool loop on Anthropic's SDK, async and blocking.

The loop is what Anthropic's own documentation shows; nothing in it knows that it is trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from builders.calculator_agent import calculate

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from anthropic.types import Message, ToolParam

_FUNCTION = CALCULATE_TOOL["function"]
_TOOL: ToolParam = {
    "name": _FUNCTION["name"],
    "description": _FUNCTION["description"],
    "input_schema": _FUNCTION["parameters"],
    "strict": _FUNCTION["strict"],
}
_MAX_TOKENS = 1024


def build_anthropic_agent() -> Callable[..., Awaitable[str]]:
    """An agent that answers with a number and may call ``calculate``."""
    return solve


def build_blocking_anthropic_agent() -> Callable[..., str]:
    """The same, written without async."""
    return solve_blocking


async def solve(
    data: Mapping[str, Any], anthropic_client: AsyncAnthropic, model: str, max_turns: int
) -> str:
    """The answer to one question."""
    messages: list[Any] = [{"role": "user", "content": data["question"]}]
    for _ in range(max_turns):
        reply = await anthropic_client.messages.create(
            model=model,
            max_tokens=_MAX_TOKENS,
            system=SYSTEM_PROMPT,
            tools=[_TOOL],
            messages=messages,
        )
        if reply.stop_reason != "tool_use":
            return read_text(reply)
        messages += continue_with_results(reply)
    return ""


def solve_blocking(
    data: Mapping[str, Any], anthropic_client: Anthropic, model: str, max_turns: int
) -> str:
    """The answer to one question, read from streams."""
    messages: list[Any] = [{"role": "user", "content": data["question"]}]
    for _ in range(max_turns):
        with anthropic_client.messages.stream(
            model=model,
            max_tokens=_MAX_TOKENS,
            system=SYSTEM_PROMPT,
            tools=[_TOOL],
            messages=messages,
        ) as stream:
            reply = stream.get_final_message()
        if reply.stop_reason != "tool_use":
            return read_text(reply)
        messages += continue_with_results(reply)
    return ""


def read_text(reply: Message) -> str:
    """The text of a reply."""
    return "".join(block.text for block in reply.content if block.type == "text")


def continue_with_results(reply: Message) -> list[dict[str, Any]]:
    """The messages that follow a reply with calls: itself, and what the tools returned."""
    results = []
    for block in reply.content:
        if block.type == "tool_use":
            expression = block.input.get("expression")
            known = block.name == "calculate" and isinstance(expression, str)
            result = calculate(str(expression)) if known else "error: no such tool or argument"
            results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    return [
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": results},
    ]
