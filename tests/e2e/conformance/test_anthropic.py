"""``/v1/messages`` on engines that sample, with Anthropic's official SDK as the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

pytest.importorskip("anthropic")

from anthropic import AsyncAnthropic
from pydantic import BaseModel

from agentrl_cli import build_anthropic_client
from agentrl_cli.tracking.client import TrackingClient

pytestmark = [pytest.mark.anthropic, pytest.mark.slow]

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What is 2 + 2?"}
TOOLS: Any = [
    {
        "name": name,
        "description": "Does it.",
        "input_schema": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
        },
    }
    for name in ("double", "halve")
]
#: Tokens that a forced call needs at most.
ENOUGH = 120


async def ask(sdk: AsyncAnthropic, *, stream: bool, **options: Any) -> Any:
    """A message whose prompt has the tokens that were counted before."""
    tools = {k: v for k, v in options.items() if k in ("tools", "tool_choice")}
    counted = await sdk.messages.count_tokens(model="m", messages=options["messages"], **tools)
    if stream:
        async with sdk.messages.stream(model="m", **options) as events:
            message = await events.get_final_message()
    else:
        message = await sdk.messages.create(model="m", **options)
    assert message.usage.input_tokens == counted.input_tokens
    return message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_conversation_exports_what_was_sampled(
    open_client: Open, engine: Any, check_sampled: Any, stream: bool
) -> None:
    tracking = open_client(seed=3)
    sdk = build_anthropic_client(tracking)
    messages: list[Any] = [USER]
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "halve", "disable_parallel_tool_use": True},
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "none"},
        {"type": "auto"},
    ]
    for choice in choices:
        message = await ask(
            sdk,
            stream=stream,
            messages=messages,
            tools=TOOLS,
            tool_choice=choice,
            max_tokens=ENOUGH if choice["type"] in ("any", "tool") else 12,
        )
        calls = [block for block in message.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": message.content})
        if choice["type"] in ("any", "tool"):
            assert message.stop_reason == "tool_use"
            [call] = calls
            assert call.name == choice.get("name", call.name)
            assert set(call.input) == {"x"}
            assert call.input["x"] in range(10)
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
            messages.append({"role": "user", "content": [result]})
        else:
            assert message.stop_reason in ("max_tokens", "end_turn")
            assert calls == []
            messages.append({"role": "user", "content": "Go on."})
    interactions = tracking.interactions
    assert len(interactions) == len(choices)
    assert [i.mismatch_cause for i in interactions] == [None] * len(choices)
    assert all(i.extends_parent for i in interactions[1:])
    assert [i.structural_tag is not None for i in interactions[:3]] == [True] * 3
    check_sampled(tracking, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_ends_at_a_stop_sequence_and_names_it(
    open_client: Open, stream: bool
) -> None:
    sdk = build_anthropic_client(open_client(seed=5))
    free = await ask(sdk, stream=stream, messages=[USER], max_tokens=40)
    text = free.content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    tracking = open_client(seed=5)
    sdk = build_anthropic_client(tracking)
    message = await ask(
        sdk, stream=stream, messages=[USER], max_tokens=40, stop_sequences=["never", stop]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert "".join(block.text for block in message.content) == text[: text.index(stop)]
    [interaction] = tracking.interactions
    assert message.usage.output_tokens == len(interaction.completion_ids)


class Weather(BaseModel):
    """The SDK sends no bounds of numbers and lengths, so none are here."""

    place: Literal["Paris", "Rome"]
    is_dry: bool
    kind: Literal["rain", "sun"] | None


@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output_is_what_the_class_says(open_client: Open, stream: bool) -> None:
    sdk = build_anthropic_client(open_client(seed=6))
    options: Any = {"model": "m", "max_tokens": 400, "messages": [USER]}
    if stream:
        async with sdk.messages.stream(output_format=Weather, **options) as events:
            message = await events.get_final_message()
    else:
        message = await sdk.messages.parse(output_format=Weather, **options)
    assert message.stop_reason == "end_turn"
    assert isinstance(message.parsed_output, Weather)
