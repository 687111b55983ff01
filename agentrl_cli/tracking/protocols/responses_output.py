"""``/v1/responses``, replies: their output items, and the events that report these as they grow.

A reply that is not streamed is written as one that is, in one piece: its text comes before its
calls.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.model_calls import (
    Choice,
    ModelCalls,
    TextLogprobs,
    count_reasoning_tokens,
)
from agentrl_cli.tracking.protocols.chat import format_error
from agentrl_cli.tracking.protocols.model_request import Problem
from agentrl_cli.tracking.protocols.responses_input import (
    ID_PREFIX,
    ResponsesRequest,
    build_item_id,
    parse_responses_request,
)
from agentrl_cli.tracking.session import Session

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


class ResponsesProtocol:
    """OpenAI's responses; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

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

    def open_writer(self, calls: ModelCalls) -> ResponseWriter:
        """Writes events in the order of OpenAI's, numbered from 0."""
        return ResponseWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object; what chat completions call otherwise gets this API's name."""
        body = format_error(problem)
        param = problem.param
        if param == "messages":
            body["error"]["param"] = "input"
        elif param is not None and param.startswith("response_format"):
            for key in ("message", "param"):
                body["error"][key] = body["error"][key].replace("response_format", "text.format")
        return body


class ResponseWriter:
    """Writes the events of one streamed reply."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._output = OutputWriter(calls.id, summarize=_get_request(calls).summarize)
        self._logprobs = _open_logprobs(calls) if calls.request.logprobs else None
        self._num_events = 0

    def begin_choice(self, index: int) -> bytes:
        """The events of the beginning: a response has one choice."""
        del index
        response = _format_response(self._calls, status="in_progress")
        names = ("response.created", "response.in_progress")
        return self._format({"type": name, "response": response} for name in names)

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """The events for what the reply got."""
        del index
        logprobs: list[Any] = []
        if self._logprobs is not None:
            logprobs = self._logprobs.feed(generation) if generation else self._logprobs.finish()
        return self._format(self._output.write(parsed, logprobs))

    def end_choice(self, choice: Choice) -> bytes:
        """The events of the end."""
        status = _find_status(choice)
        events = self._output.end(status)
        response = _format_ended(self._calls, choice, self._output)
        return self._format([*events, {"type": f"response.{status}", "response": response}])

    def end(self) -> bytes:
        """Nothing: the last event said so."""
        return b""

    def fail(self, problem: Problem) -> bytes:
        """``response.failed``, and an ``error`` event, at which clients stop."""
        reason = {"code": "server_error", "message": problem.message}
        response = _format_response(
            self._calls, status="failed", output=self._output.output, error=reason
        )
        error = ResponsesProtocol().format_error(problem)["error"]
        flat = {key: error[key] for key in ("code", "message", "param")}
        return self._format(
            [
                {"type": "response.failed", "response": response},
                {"type": "error", **flat, "error": error},
            ]
        )

    def _format(self, events: Iterable[Event]) -> bytes:
        """Server-sent events, named after their types and numbered."""
        lines = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            data = json.dumps(numbered, ensure_ascii=False)
            lines.append(f"event: {event['type']}\ndata: {data}\n\n")
            self._num_events += 1
        return "".join(lines).encode()


class OutputWriter:
    """Turns what a reply gets, piece by piece, into output items and their events.

    An item ends before the next begins: reasoning, text and calls alternate as they were
    sampled. Events come without their sequence numbers.

    Args:
        response_id: of the reply.
        summarize: reasoning is written as a summary, not as the item's content.
    """

    def __init__(self, response_id: str, *, summarize: bool) -> None:
        self._response_id = response_id
        self._summarize = summarize
        self._open: _OpenItem | None = None
        self.output: list[Item] = []
        """The items that have ended."""

    def write(self, parsed: ParsedText, logprobs: Sequence[Any]) -> list[Event]:
        """The events for what is new; ``logprobs`` are those of its text."""
        events: list[Event] = []
        if parsed.reasoning:
            events += self._switch_to("reasoning")
            events += self._extend(parsed.reasoning, [])
        if parsed.content:
            events += self._switch_to("message")
            events += self._extend(parsed.content, logprobs)
        for call in parsed.tool_calls:
            events += self._close("completed")
            events += self._write_call(call)
        return events

    def end(self, status: Status) -> list[Event]:
        """The events of the end; a reply of nothing has one empty message."""
        events = [] if self._open is not None or self.output else self._switch_to("message")
        return events + self._close(status)

    def _switch_to(self, kind: Literal["reasoning", "message"]) -> list[Event]:
        if self._open is not None and self._open.kind == kind:
            return []
        events = self._close("completed")
        index = len(self.output)
        prefix = "rs" if kind == "reasoning" else "msg"
        item_id = build_item_id(prefix, self._response_id, index)
        self._open = _OpenItem(kind, item_id, index, self._summarize)
        return events + self._open.begin()

    def _extend(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        assert self._open is not None
        return self._open.extend(text, logprobs)

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self.output.append(item)
        self._open = None
        return events

    def _write_call(self, call: Mapping[str, Any]) -> list[Event]:
        index = len(self.output)
        function = call["function"]
        item = {
            "id": build_item_id("fc", self._response_id, index),
            "type": "function_call",
            "status": "completed",
            "arguments": function["arguments"],
            "call_id": call["id"],
            "name": function["name"],
        }
        self.output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        prefix = "response.function_call_arguments"
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": f"{prefix}.delta", **place, "delta": item["arguments"]},
            {
                "type": f"{prefix}.done",
                **place,
                "arguments": item["arguments"],
                "name": item["name"],
            },
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]


class _OpenItem:
    """A message or reasoning item that still grows."""

    def __init__(
        self, kind: Literal["reasoning", "message"], item_id: str, index: int, summarize: bool
    ) -> None:
        self.kind = kind
        self._id = item_id
        self._index = index
        self._in_summary = kind == "reasoning" and summarize
        self._text = ""
        self._logprobs: list[Any] = []
        where = "summary_index" if self._in_summary else "content_index"
        self._place = {"item_id": item_id, "output_index": index, where: 0}

    def begin(self) -> list[Event]:
        added = {"type": "response.output_item.added", "output_index": self._index}
        return [
            {**added, "item": self._build_item("in_progress", is_begun=False)},
            {"type": f"{self._name_part()}.added", **self._place, "part": self._build_part()},
        ]

    def extend(self, text: str, logprobs: Sequence[Any]) -> list[Event]:
        self._text += text
        self._logprobs += logprobs
        delta = {"type": f"{self._name_text()}.delta", **self._place, "delta": text}
        if self.kind == "message":
            delta["logprobs"] = list(logprobs)
        return [delta]

    def end(self, status: Status) -> tuple[Item, list[Event]]:
        item = self._build_item(status, is_begun=True)
        done = {"type": f"{self._name_text()}.done", **self._place, "text": self._text}
        if self.kind == "message":
            done["logprobs"] = self._logprobs
        return item, [
            done,
            {"type": f"{self._name_part()}.done", **self._place, "part": self._build_part()},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def _name_text(self) -> str:
        if self.kind == "message":
            return "response.output_text"
        return f"response.reasoning_{'summary_text' if self._in_summary else 'text'}"

    def _name_part(self) -> str:
        return "response.reasoning_summary_part" if self._in_summary else "response.content_part"

    def _build_part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            kind = "summary_text" if self._in_summary else "reasoning_text"
            return {"type": kind, "text": self._text}
        return {
            "type": "output_text",
            "text": self._text,
            "annotations": [],
            "logprobs": list(self._logprobs),
        }

    def _build_item(self, status: str, *, is_begun: bool) -> Item:
        parts = [self._build_part()] if is_begun else []
        item: Item = {"id": self._id, "type": self.kind, "status": status}
        if self.kind == "message":
            return {**item, "role": "assistant", "content": parts}
        summary, content = (parts, []) if self._in_summary else ([], parts)
        return {**item, "summary": summary, "content": content, "encrypted_content": None}


def _get_request(calls: ModelCalls) -> ResponsesRequest:
    assert isinstance(calls.request, ResponsesRequest)
    return calls.request


def _open_logprobs(calls: ModelCalls) -> TextLogprobs:
    return TextLogprobs(calls.template, calls.open_reader(calls.calls[0]))


def _find_status(choice: Choice) -> Status:
    return "incomplete" if choice.generation.finish_reason == "length" else "completed"


def _format_response(
    calls: ModelCalls, *, status: str, output: Sequence[Item] = (), **more: Any
) -> dict[str, Any]:
    """A ``response`` object; ``more`` are its fields that depend on how it ended."""
    return {
        "id": calls.id,
        "object": "response",
        "created_at": calls.created,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": calls.engine.model_name,
        "output": list(output),
        "usage": None,
        **_get_request(calls).echo,
        **more,
    }


def _format_ended(calls: ModelCalls, choice: Choice, writer: OutputWriter) -> dict[str, Any]:
    status = _find_status(choice)
    num_tokens = len(choice.generation.completion_ids)
    num_reasoning_tokens = count_reasoning_tokens(
        calls.template, choice.generation, choice.interaction.reply
    )
    is_cut = status == "incomplete"
    return _format_response(
        calls,
        status=status,
        output=writer.output,
        usage={
            "input_tokens": calls.num_prompt_tokens,
            # What an engine had cached is not known here.
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": calls.num_prompt_tokens + num_tokens,
        },
        completed_at=None if is_cut else int(time.time()),
        incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
    )
