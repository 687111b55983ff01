"""``/v1/responses``, the way out: the output items of a reply, and the events that tell of them.

A reply that is not streamed is written as one that is, in one piece: its text comes before its
calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl_cli.tracking.responses_items import build_item_id
from agentrl_cli.tracking.tool_calls import ParsedText

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["completed", "incomplete"]


def format_response(
    response_id: str,
    created_at: int,
    model: str,
    echo: Mapping[str, Any],
    *,
    status: str,
    output: Sequence[Item] = (),
    usage: Mapping[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A ``response`` object; ``more`` are its fields that depend on how it ended."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": status,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": list(output),
        "usage": usage,
        **echo,
        **more,
    }


def format_usage(
    num_prompt_tokens: int, num_completion_tokens: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    """The token counts of a response; what an engine had cached is not known here."""
    return {
        "input_tokens": num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def format_event(event: Event) -> bytes:
    """A server-sent event, named after its type."""
    data = json.dumps(event, ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


class OutputWriter:
    """Turns what a reply gets, piece by piece, into output items and their events.

    An item ends before the next begins: thoughts, text and calls alternate as they were
    sampled. Events come without their sequence numbers.

    Args:
        response_id: of the reply.
        summarize: thoughts are written as the reasoning's summary, not as its content.
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
    """A message or a chain of thought that still grows."""

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
