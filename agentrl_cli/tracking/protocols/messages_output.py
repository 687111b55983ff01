"""``/v1/messages``, replies: messages, stream events and errors as JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.records import Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.model_calls import Choice, ModelCalls
from agentrl_cli.tracking.protocols.messages_input import (
    MessagesRequest,
    ThinkingDisplay,
    parse_messages_request,
    sign_thinking,
)
from agentrl_cli.tracking.protocols.model_request import ModelRequest, Problem
from agentrl_cli.tracking.session import Session

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


class MessagesProtocol:
    """Anthropic's messages; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; see :func:`parse_messages_request`."""
        return parse_messages_request(body, session)

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``message``."""
        [choice] = choices
        request = _get_request(calls)
        return _format_message(
            calls,
            _format_blocks(choice.interaction.reply or {}, request.thinking),
            len(choice.generation.completion_ids),
            _find_stop(choice, request.stop_sequences),
        )

    def open_writer(self, calls: ModelCalls) -> EventWriter:
        """Writes ``message_start``, the events of each content block, and the end."""
        return EventWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """Anthropic's error object."""
        return format_error(problem)


class CountTokensProtocol(MessagesProtocol):
    """Counts the prompt that a message would have, and records nothing."""

    path = "/v1/messages/count_tokens"

    def format_count(self, num_prompt_tokens: int) -> dict[str, Any]:
        """The tokens of the prompt, those of earlier turns as they were sampled."""
        return {"input_tokens": num_prompt_tokens}


class EventWriter:
    """Writes the events of one streamed reply: its content blocks one after the other."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._request = _get_request(calls)
        self._index = -1
        self._open: str | None = None
        """The type of the block that more may be added to."""
        self._thinking = ""
        """Of the open block."""

    def begin_choice(self, index: int) -> bytes:
        """``message_start``: a message has one choice."""
        del index
        message = _format_message(self._calls, [], 0, (None, None))
        return format_event("message_start", message=message) + format_event("ping")

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """The events for what a reply got; empty where nothing can be shown of it."""
        del index, generation
        events: list[bytes] = []
        if parsed.reasoning and self._request.thinking != "hidden":
            events += self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thinking += parsed.reasoning
            if self._request.thinking == "shown":
                events.append(self._add("thinking_delta", thinking=parsed.reasoning))
        if parsed.content:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._add("text_delta", text=parsed.content))
        for call in parsed.tool_calls:
            events += self._end_block()
            events += self._begin("tool_use", {**_begin_call(call), "input": {}})
            arguments = call["function"]["arguments"]
            events.append(self._add("input_json_delta", partial_json=arguments))
        return b"".join(events)

    def end_choice(self, choice: Choice) -> bytes:
        """The end of the last block, and ``message_delta``."""
        stop_reason, stop_sequence = _find_stop(choice, self._request.stop_sequences)
        delta = format_event(
            "message_delta",
            delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
            usage={"output_tokens": len(choice.generation.completion_ids)},
        )
        return b"".join([*self._end_block(), delta])

    def end(self) -> bytes:
        """``message_stop``."""
        return format_event("message_stop")

    def fail(self, problem: Problem) -> bytes:
        """The error as an event."""
        return format_event("error", **format_error(problem))

    def _end_block(self) -> list[bytes]:
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
        events = self._end_block()
        self._index += 1
        self._open = kind
        begin = format_event("content_block_start", index=self._index, content_block=block)
        return [*events, begin]

    def _add(self, kind: str, **delta: Any) -> bytes:
        return format_event("content_block_delta", index=self._index, delta={"type": kind, **delta})


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


def _get_request(calls: ModelCalls) -> MessagesRequest:
    assert isinstance(calls.request, MessagesRequest)
    return calls.request


def _format_message(
    calls: ModelCalls,
    content: list[Block],
    num_completion_tokens: int,
    stop: tuple[str | None, str | None],
) -> dict[str, Any]:
    """A message; ``stop`` is its reason and its stop sequence, None as long as it grows."""
    stop_reason, stop_sequence = stop
    return {
        "id": calls.id,
        "type": "message",
        "role": "assistant",
        "model": calls.engine.model_name,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": {
            "input_tokens": calls.num_prompt_tokens,
            # Nothing is billed, so nothing counts as cached.
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_completion_tokens,
        },
    }


def _format_blocks(reply: Message, thinking: ThinkingDisplay) -> list[Block]:
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


def _find_stop(choice: Choice, stop_sequences: Sequence[str]) -> tuple[str, str | None]:
    """Why a reply ended: Anthropic's reason, and the request's stop sequence if that did it."""
    finish_reason = choice.interaction.finish_reason
    if finish_reason == "tool_calls":
        return "tool_use", None
    if finish_reason == "length":
        return "max_tokens", None
    if choice.generation.stop_text in stop_sequences:
        return "stop_sequence", choice.generation.stop_text
    return "end_turn", None


def _begin_call(call: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
