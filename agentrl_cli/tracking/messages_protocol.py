"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from agentrl_cli.tracking.messages_reply import (
    EventWriter,
    find_stop,
    format_blocks,
    format_error,
    format_event,
    format_message,
    format_usage,
)
from agentrl_cli.tracking.messages_request import MessagesRequest, parse_messages_request
from agentrl_cli.tracking.model_calls import Choice, ModelCalls
from agentrl_cli.tracking.model_request import ModelRequest
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.wire import Problem


class MessagesProtocol:
    """Anthropic's messages; see :class:`~agentrl_cli.tracking.wire.WireProtocol`."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; see :func:`parse_messages_request`."""
        return parse_messages_request(body, session)

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``message``."""
        [choice] = choices
        request = _get_request(calls)
        return format_message(
            calls.id,
            calls.engine.model_name,
            format_blocks(choice.interaction.reply or {}, request.thinking),
            format_usage(calls.num_prompt_tokens, len(choice.generation.completion_ids)),
            find_stop(choice, request.stop_sequences),
        )

    async def stream_events(self, calls: ModelCalls) -> AsyncGenerator[bytes]:
        """``message_start``, the events of each content block, ``message_delta`` and the end."""
        request = _get_request(calls)
        writer = EventWriter(request.thinking)
        has_begun = False
        async with aclosing(calls.stream()) as items:
            async for item in items:
                if isinstance(item, Choice):
                    yield _format_end(item, writer, request)
                elif not has_begun:
                    has_begun = True
                    yield _format_begin(calls)
                elif events := writer.write(item.parsed):
                    yield events

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """Anthropic's error object."""
        return format_error(problem)

    def format_stream_error(self, problem: Problem, num_events: int) -> bytes:
        """The same as an event."""
        return format_event("error", **self.format_error(problem))


class CountTokensProtocol(MessagesProtocol):
    """Counts the prompt that a message would have, and records nothing."""

    path = "/v1/messages/count_tokens"

    def format_count(self, num_prompt_tokens: int) -> dict[str, Any]:
        """The tokens of the prompt, those of earlier turns as they were sampled."""
        return {"input_tokens": num_prompt_tokens}


def _get_request(calls: ModelCalls) -> MessagesRequest:
    assert isinstance(calls.request, MessagesRequest)
    return calls.request


def _format_begin(calls: ModelCalls) -> bytes:
    usage = format_usage(calls.num_prompt_tokens, 0)
    message = format_message(calls.id, calls.engine.model_name, [], usage, None)
    return format_event("message_start", message=message) + format_event("ping")


def _format_end(choice: Choice, writer: EventWriter, request: MessagesRequest) -> bytes:
    stop_reason, stop_sequence = find_stop(choice, request.stop_sequences)
    delta = format_event(
        "message_delta",
        delta={"stop_reason": stop_reason, "stop_sequence": stop_sequence},
        usage={"output_tokens": len(choice.generation.completion_ids)},
    )
    return b"".join([*writer.end(), delta, format_event("message_stop")])
