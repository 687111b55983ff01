"""``/v1/messages``, the way out: messages, stream events and errors as JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from agentrl_cli.records import Message
from agentrl_cli.tracking.messages_blocks import sign_thinking
from agentrl_cli.tracking.messages_request import ThinkingDisplay
from agentrl_cli.tracking.model_calls import Choice
from agentrl_cli.tracking.tool_calls import ParsedText
from agentrl_cli.tracking.wire import Problem

Block = dict[str, Any]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def format_message(
    message_id: str,
    model: str,
    content: Sequence[Block],
    usage: dict[str, int],
    stop: tuple[str, str | None] | None,
) -> dict[str, Any]:
    """A message; ``stop`` is its reason and its stop sequence, None as long as it goes on."""
    stop_reason, stop_sequence = stop or (None, None)
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": list(content),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage,
    }


def format_usage(num_prompt_tokens: int, num_completion_tokens: int) -> dict[str, int]:
    """Anthropic's token counts; nothing is billed, so nothing counts as cached."""
    return {
        "input_tokens": num_prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_completion_tokens,
    }


def format_blocks(reply: Message, thinking: ThinkingDisplay) -> list[Block]:
    """The content blocks of a recorded reply: its thinking, its text, its calls."""
    blocks: list[Block] = []
    reasoning = reply.get("reasoning_content")
    if reasoning and thinking != "hidden":
        shown = reasoning if thinking == "shown" else ""
        blocks.append(
            {"type": "thinking", "thinking": shown, "signature": sign_thinking(reasoning)}
        )
    if reply.get("content"):
        blocks.append({"type": "text", "text": reply["content"]})
    for call in reply.get("tool_calls") or ():
        blocks.append({**_begin_call(call), "input": json.loads(call["function"]["arguments"])})
    return blocks


def find_stop(choice: Choice, stop_sequences: Sequence[str]) -> tuple[str, str | None]:
    """Why a reply ended: Anthropic's reason, and the request's stop sequence if that did it."""
    finish_reason = choice.interaction.finish_reason
    if finish_reason == "tool_calls":
        return "tool_use", None
    if finish_reason == "length":
        return "max_tokens", None
    if choice.generation.stop_text in stop_sequences:
        return "stop_sequence", choice.generation.stop_text
    return "end_turn", None


def format_error(problem: Problem) -> dict[str, Any]:
    """An error in Anthropic's shape; ``details`` hold a code where there is one."""
    error: dict[str, Any] = {
        "type": _ERROR_TYPES.get(problem.status, "invalid_request_error"),
        "message": problem.message,
    }
    if problem.code is not None:
        error["details"] = {"error_code": problem.code}
    return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex[:24]}"}


def format_event(kind: str, **data: Any) -> bytes:
    """A server-sent event."""
    text = json.dumps({"type": kind, **data}, ensure_ascii=False)
    return f"event: {kind}\ndata: {text}\n\n".encode()


class EventWriter:
    """Writes the content blocks of one streamed reply: one after the other, each closed.

    Args:
        thinking: how thinking is shown.
    """

    def __init__(self, thinking: ThinkingDisplay) -> None:
        self._display = thinking
        self._index = -1
        self._open: str | None = None
        """The type of the block that more may be added to."""
        self._thinking = ""
        """Of the open block."""

    def write(self, parsed: ParsedText) -> bytes:
        """The events for what a reply got; empty where nothing can be shown of it."""
        events: list[bytes] = []
        if parsed.reasoning and self._display != "hidden":
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking += parsed.reasoning
            if self._display == "shown":
                events.append(self._add("thinking_delta", thinking=parsed.reasoning))
        if parsed.content:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._add("text_delta", text=parsed.content))
        for call in parsed.tool_calls:
            events += self.end()
            events += self._begin("tool_use", {**_begin_call(call), "input": {}})
            arguments = call["function"]["arguments"]
            events.append(self._add("input_json_delta", partial_json=arguments))
        return b"".join(events)

    def end(self) -> list[bytes]:
        """The events that close the open block, if there is one."""
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._add("signature_delta", signature=sign_thinking(self._thinking)))
            self._thinking = ""
        self._open = None
        return [*events, format_event("content_block_stop", index=self._index)]

    def _begin(self, kind: str, block: Block) -> list[bytes]:
        """The events that open a block of this type, if none is open."""
        if self._open == kind:
            return []
        events = self.end()
        self._index += 1
        self._open = kind
        begin = format_event("content_block_start", index=self._index, content_block=block)
        return [*events, begin]

    def _add(self, kind: str, **delta: Any) -> bytes:
        return format_event("content_block_delta", index=self._index, delta={"type": kind, **delta})


def _begin_call(call: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
