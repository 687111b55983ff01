"""``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from agentrl_cli.tracking.chat_reply import format_error
from agentrl_cli.tracking.model_calls import Choice, ModelCalls, Piece
from agentrl_cli.tracking.responses_items import ID_PREFIX
from agentrl_cli.tracking.responses_reply import (
    Event,
    OutputWriter,
    Status,
    format_event,
    format_response,
    format_usage,
)
from agentrl_cli.tracking.responses_request import ResponsesRequest, parse_responses_request
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.token_report import TextLogprobs, count_tokens_until
from agentrl_cli.tracking.tool_calls import ParsedText
from agentrl_cli.tracking.wire import Problem, describe_error


class ResponsesProtocol:
    """OpenAI's responses; see :class:`~agentrl_cli.tracking.wire.WireProtocol`."""

    path = "/v1/responses"
    id_prefix = ID_PREFIX

    def parse(self, body: dict[str, Any], session: Session) -> ResponsesRequest:
        """The request; see :func:`parse_responses_request`."""
        return parse_responses_request(body, session)

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``response``."""
        [choice] = choices
        reply = choice.interaction.reply or {}
        parsed = ParsedText(
            content=reply.get("content") or "",
            tool_calls=list(reply.get("tool_calls") or ()),
            reasoning=reply.get("reasoning_content") or "",
        )
        writer = OutputWriter(calls.id, summarize=_get_request(calls).summarize)
        logprobs: list[Any] = []
        if calls.request.logprobs:
            of_text = _open_logprobs(calls)
            logprobs = of_text.feed(choice.generation) + of_text.finish()
        writer.write(parsed, logprobs)
        writer.end(_find_status(choice))
        return _format_ended(calls, choice, writer)

    async def stream_events(self, calls: ModelCalls) -> AsyncGenerator[bytes]:
        """Events in the order of OpenAI's, numbered from 0; a failure is told as one too."""
        writer = _EventWriter(calls)
        async with aclosing(calls.stream()) as items:
            try:
                async for item in items:
                    events = writer.end(item) if isinstance(item, Choice) else writer.write(item)
                    for event in events:
                        yield event
            except Exception as error:
                # Before the first event the failure gets a status; after it, this event, and
                # then the one of format_stream_error, at which clients stop.
                if writer.has_begun:
                    yield writer.fail(describe_error(error))
                raise

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object; what chat completions call otherwise gets this API's name."""
        message, param = problem.message, problem.param
        if param == "messages":
            param = "input"
        elif param is not None and param.startswith("response_format"):
            message = message.replace("response_format", "text.format")
            param = param.replace("response_format", "text.format")
        return format_error(message, problem.kind, param=param, code=problem.code)

    def format_stream_error(self, problem: Problem, num_events: int) -> bytes:
        """An ``error`` event, numbered like those before it."""
        error = self.format_error(problem)["error"]
        flat = {key: error[key] for key in ("code", "message", "param")}
        return format_event(
            {"type": "error", "sequence_number": num_events, **flat, "error": error}
        )


class _EventWriter:
    """Writes the events of one streamed reply."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._output = OutputWriter(calls.id, summarize=_get_request(calls).summarize)
        self._logprobs = _open_logprobs(calls) if calls.request.logprobs else None
        self._num_events = 0

    @property
    def has_begun(self) -> bool:
        """Whether an event was written."""
        return self._num_events > 0

    def write(self, piece: Piece) -> list[bytes]:
        """The events for what the reply got."""
        if not self.has_begun:
            response = _format(self._calls, status="in_progress")
            names = ("response.created", "response.in_progress")
            return self._number({"type": name, "response": response} for name in names)
        logprobs: list[Any] = []
        if self._logprobs is not None:
            generation = piece.generation
            logprobs = self._logprobs.feed(generation) if generation else self._logprobs.finish()
        return self._number(self._output.write(piece.parsed, logprobs))

    def end(self, choice: Choice) -> list[bytes]:
        """The events of the end."""
        status = _find_status(choice)
        events = self._output.end(status)
        response = _format_ended(self._calls, choice, self._output)
        return self._number([*events, {"type": f"response.{status}", "response": response}])

    def fail(self, problem: Problem) -> bytes:
        """The event that says that the reply will not be completed."""
        error = {"code": "server_error", "message": problem.message}
        response = _format(self._calls, status="failed", output=self._output.output, error=error)
        [event] = self._number([{"type": "response.failed", "response": response}])
        return event

    def _number(self, events: Iterable[Event]) -> list[bytes]:
        numbered = []
        for event in events:
            numbered.append(format_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return numbered


def _get_request(calls: ModelCalls) -> ResponsesRequest:
    assert isinstance(calls.request, ResponsesRequest)
    return calls.request


def _open_logprobs(calls: ModelCalls) -> TextLogprobs:
    return TextLogprobs(calls.template, calls.open_reader(calls.calls[0]))


def _find_status(choice: Choice) -> Status:
    return "incomplete" if choice.generation.finish_reason == "length" else "completed"


def _format(calls: ModelCalls, *, status: str, **fields: Any) -> dict[str, Any]:
    return format_response(
        calls.id,
        int(calls.started_at),
        calls.engine.model_name,
        _get_request(calls).echo,
        status=status,
        **fields,
    )


def _format_ended(calls: ModelCalls, choice: Choice, writer: OutputWriter) -> dict[str, Any]:
    status = _find_status(choice)
    ids = choice.generation.completion_ids
    reasoning = (choice.interaction.reply or {}).get("reasoning_content") or ""
    is_cut = status == "incomplete"
    return _format(
        calls,
        status=status,
        output=writer.output,
        usage=format_usage(
            calls.num_prompt_tokens, len(ids), count_tokens_until(calls.template, ids, reasoning)
        ),
        completed_at=None if is_cut else int(time.time()),
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
    )
