"""What cannot be honoured is refused with its place, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.tracking.client import TrackingClient

USER: Any = {"role": "user", "content": "What?"}
CHAT = ("/v1/chat/completions", {"messages": [USER]})
RESPONSES = ("/v1/responses", {"input": "What?"})
MESSAGES = ("/v1/messages", {"messages": [USER], "max_tokens": 9})
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT_TOOL = {"type": "function", "name": "f"}
OWN_TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "image_url": "data:,x"}
NO_IMAGES = "must be text or a list of parts of type"


def say(*blocks: Any, role: str = "assistant", **message: Any) -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks), **message}, USER]}


@pytest.mark.parametrize(
    ("protocol", "body", "param", "message"),
    [
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, say(IMAGE), "messages[1].content", NO_IMAGES),
        (CHAT, say(role="robot"), "messages[1].role", "'user', 'assistant' or 'tool', found 'rob"),
        (CHAT, say(name=5), "messages[1].name", "input should be a valid string, found 5"),
        (CHAT, say(function_call={"name": "f"}), "messages[1].function_call", "use tool_calls"),
        (CHAT, say(refusal="No."), "messages[1].refusal", "send it as content"),
        (CHAT, say(prefix=True), "messages[1].prefix", "no prefill"),
        (
            CHAT,
            say(tool_calls=[{"function": {"name": 1}}]),
            "messages[1].tool_calls[0].function.name",
            "found 1",
        ),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools[0].function.name", "found 'a b'"),
        (CHAT, {"tools": [TOOL] * 2}, "tools", "two functions named 'f'"),
        (CHAT, {"tools": [TOOL], "tool_choice": "always"}, "tool_choice", "'required'"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "ff"}}},
         "tool_choice", "did you mean 'f'"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "no tools are given"),
        (CHAT, {"temperature": 11}, "temperature", "less than or equal to 10, found 11"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "leave it out"),
        (CHAT, {"presence_penalty": 1}, "presence_penalty", "= 1 is not supported here; leave it"),
        (CHAT, {"stream_options": {"x": 1}}, "stream_options.x", "allowed: include_usage"),
        (CHAT, {"stop": [""]}, "stop[0]", "at least 1 character"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_obj"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
         "response_format.json_schema.schema", "field required"),
        (CHAT, {"temprature": 1}, "temprature", "did you mean 'temperature'"),
        (CHAT, {"seed": 2**63}, "seed", "less than"),
        (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "thinking"),
        (RESPONSES, {"input": []}, "input", "at least one item"),
        (RESPONSES, {"input": 5}, "input", "input should be a valid list, found 5"),
        (RESPONSES, {"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content",
         NO_IMAGES),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "m"}]}, "input[0]", "'item_ref"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id",
         "field required"),
        (RESPONSES, {"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type",
         "input should be 'function', found 'web_search'"),
        (RESPONSES, {"tools": [{**FLAT_TOOL, "async": True}]}, "tools[0].async", "= True is not"),
        (RESPONSES, {"tools": [{**FLAT_TOOL, "descripton": "x"}]}, "tools[0].descripton",
         "did you mean 'description'"),
        (RESPONSES, {"tools": [FLAT_TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice",
         "built-in tools do not run"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "s",
                                         "schema": {"type": 5}}}},
         "text.format.json_schema.schema", "text.format.json_schema.schema"),
        (RESPONSES, {"background": True}, "background", "= True is not supported"),
        (RESPONSES, {"conversation": "c"}, "conversation", "not supported"),
        (RESPONSES, {"include": ["everything"]}, "include[0]", "found 'everything'"),
        (RESPONSES, {"metadata": {"a": 1}}, "metadata.a", "input should be a valid string"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'"),
        (MESSAGES, {"messages": [USER, {**USER, "role": "assistant"}]}, "messages", "no prefill"),
        (MESSAGES, say(role="tool"), "messages[1]", "input tag 'tool' found using 'role'"),
        (MESSAGES, say(IMAGE, role="user"), "messages[1].content[0]", "'text', 'tool_result'"),
        (MESSAGES, say({"type": "tool_result"}, role="user"), "messages[1].content[0].tool_use_id",
         "field required"),
        (MESSAGES, say({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}),
         "messages[1].content[0].input", "input should be a valid dictionary, found '{}'"),
        (MESSAGES, {"system": [IMAGE]}, "system", NO_IMAGES),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type",
         "input should be 'custom', found 'bash_20250124'"),
        (MESSAGES, {"tools": [{"name": "f"}]}, "tools[0].input_schema", "field required"),
        (MESSAGES, {"tools": [{**OWN_TOOL, "defer_loading": True}]}, "tools[0].defer_loading",
         "= True is not supported"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice", "no tools are given"),
        (MESSAGES, {"tools": [OWN_TOOL], "tool_choice": {"type": "tool", "name": "ff"}},
         "tool_choice", "did you mean 'f'"),
        (MESSAGES, {"top_k": 5}, "top_k", "= 5 is not supported here; leave it out"),
        (MESSAGES, {"output_config": {"format": {"type": "xml"}}}, "output_config.format.type",
         "input should be 'json_schema'"),
        (MESSAGES, {"thread": {"type": "continue", "previous_message_id": "m"}, "system": "Be."},
         "system", "system stays as it was when the thread was created"),
        (MESSAGES, {"container": "c"}, "container", "not supported here"),
    ],
)  # fmt: skip
async def test_what_cannot_be_honoured_is_refused_with_its_place(
    open_client: Callable[..., TrackingClient],
    protocol: tuple[str, dict[str, Any]],
    body: dict[str, Any],
    param: str,
    message: str,
) -> None:
    client = open_client("never")
    path, given = protocol
    for asked in (path, f"{path}/count_tokens") if path == MESSAGES[0] else (path,):
        reply = await client.gateway.http_client.post(
            f"http://agentrl.invalid{asked}",
            json={"model": "m", "stream": True, **given, **body},
            headers={"authorization": f"Bearer {client.session_key}"},
        )
        error = reply.json()["error"]
        assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
        assert message in error["message"]
        assert error.get("param", param) == param
        assert param in error["message"]
    assert client.interactions == ()
    assert client.gateway.engine.prompts == []  # type: ignore[attr-defined]
