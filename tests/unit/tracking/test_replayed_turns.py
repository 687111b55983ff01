"""Six turns are one sample, whatever a client adds to what it sends back, in every protocol."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NUM_TURNS = 6
REPLIES = [
    f'I look.\n<tool_call>\n{{"name": "f", "arguments": {{"x": {n}}}}}\n</tool_call>'
    for n in range(NUM_TURNS - 1)
]


def turn_around(value: Any) -> Any:
    """The same JSON with the keys of all objects in reverse."""
    if isinstance(value, dict):
        return {key: turn_around(value[key]) for key in reversed(value)}
    return [turn_around(item) for item in value] if isinstance(value, list) else value


async def post(client: TrackingClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {client.session_key}"}
    url = f"http://agentrl.invalid{path}"
    response = await client.gateway.http_client.post(
        url, json={"model": "m", **body}, headers=headers
    )
    assert response.status_code == 200, response.text
    return response.json()


async def take_chat_turn(client: Any, history: list[Any], tool: Any, notes: Any) -> list[Any]:
    tools = [{"type": "function", "function": tool}]
    body = {"messages": history, "tools": tools}
    reply = await post(client, "/v1/chat/completions", body)
    [choice] = reply["choices"]
    calls = [{**call, **notes} for call in choice["message"].get("tool_calls", ())]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
    return [{**choice["message"], "tool_calls": calls, **notes}, *results]


async def take_responses_turn(client: Any, history: list[Any], tool: Any, notes: Any) -> list[Any]:
    body = {"input": history, "tools": [{"type": "function", **tool}]}
    reply = await post(client, "/v1/responses", body)
    calls = [item for item in reply["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}
        for call in calls
    ]
    return [*({**notes, **item} for item in reply["output"]), *results]


async def take_messages_turn(client: Any, history: list[Any], tool: Any, notes: Any) -> list[Any]:
    own = {"name": tool["name"], "input_schema": tool["parameters"]}
    body = {"messages": history, "max_tokens": 400, "tools": [own]}
    reply = await post(client, "/v1/messages", body)
    blocks = [{**notes, **block} for block in reply["content"]]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "4"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    user = [{"role": "user", "content": results}] if results else []
    return [{"role": "assistant", "content": blocks, **notes}, *user]


@pytest.mark.parametrize(
    "notes",
    [
        {"name": "agent"},  # LangGraph
        {"function_call": None, "provider_specific_fields": {"refusal": None}},  # LiteLLM
        {"parsed": {"x": 1}, "annotations": [], "audio": None},  # the SDK's parse()
    ],
    ids=["langgraph", "litellm", "parse"],
)
@pytest.mark.parametrize("take_turn", [take_chat_turn, take_responses_turn, take_messages_turn])
async def test_six_turns_are_one_sample(
    open_client: Open, take_turn: Callable[..., Any], notes: dict[str, Any]
) -> None:
    client = open_client(*REPLIES, "done")
    history: list[Any] = [{"role": "user", "content": "What?"}]
    tool = {"name": "f", "description": "Does.", "parameters": SCHEMA}
    for _ in range(NUM_TURNS):
        history += await take_turn(client, history, tool, notes)
        tool = turn_around(tool)
        # What was sent before may change as well.
        history = [turn_around({**notes, **item}) for item in history]
    assert [i.mismatch_cause for i in client.interactions] == [None] * NUM_TURNS
    [sample] = client.export_interactions().values()
    assert sum(sample.loss_mask) == sum(len(i.completion_ids) for i in client.interactions)


async def test_what_the_sdk_parses_comes_back_as_the_same_turns(open_client: Open) -> None:
    client = open_client(*REPLIES, "done")
    tool: Any = {
        "name": "f",
        "strict": True,
        "parameters": SCHEMA | {"additionalProperties": False},
    }
    messages: list[Any] = [{"role": "user", "content": "What?"}]
    for _ in range(NUM_TURNS):
        completion = await client.chat.completions.parse(
            model="m", messages=messages, tools=[{"type": "function", "function": tool}]
        )
        reply = completion.choices[0].message
        messages.append(json.loads(reply.model_dump_json()))
        for call in reply.tool_calls or ():
            assert "parsed_arguments" in call.function.model_dump()
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "4"})
    assert len(client.export_interactions()) == 1
