"""``/v1/responses``: input items become chat messages, and replies output items and their events.

A session keeps every reply as long as it lasts, so ``previous_response_id`` finds those with
``store: false`` too.

The output of one turn comes back as several items (reasoning, text, calls); they become one
assistant message again, so that the turn is found by its meaning whatever it was sent back as.
A reply that is not streamed is written as one that is, in one piece: its text comes before its
calls.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.model_calls import (
    Choice,
    ModelCalls,
    TextLogprobs,
    count_reasoning_tokens,
)
from agentrl_cli.tracking.protocols.chat import ChatProtocol
from agentrl_cli.tracking.protocols.model_request import (
    NEUTRAL_KEYS,
    CheckedFields,
    Effort,
    Function,
    Limit,
    ModelRequest,
    NonEmptyText,
    Problem,
    RequestBody,
    RequestError,
    RequestFields,
    TopLogprobs,
    Verbosity,
    build_assistant_message,
    build_rules,
    parse_format,
    parse_tool_choice,
    texts_of,
    validate,
)
from agentrl_cli.tracking.session import Session

Item = dict[str, Any]
Event = dict[str, Any]
Status = Literal["completed", "incomplete"]
#: An item that grows: text, or reasoning as the item's content or its summary.
_Growing = Literal["message", "reasoning", "summary"]
#: How events name the text and its part, the part's type, and the key of its place.
_NAMES: Mapping[_Growing, tuple[str, str, str, str]] = {
    "message": (
        "response.output_text", "response.content_part", "output_text", "content_index",
    ),
    "reasoning": (
        "response.reasoning_text", "response.content_part", "reasoning_text", "content_index",
    ),
    "summary": (
        "response.reasoning_summary_text", "response.reasoning_summary_part", "summary_text",
        "summary_index",
    ),
}  # fmt: skip
_ID_PREFIX = "resp_"
#: Output items' ids: kind, response and place. Items that are sent back say by it which of them
#: were one turn.
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_[0-9]+")
_LOGPROBS = "message.output_text.logprobs"
_Texts = Annotated[
    list[str],
    texts_of("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"),
]
_Summary = Literal["auto", "concise", "detailed"]


class _Item(RequestFields):
    id: str | None = None


class _MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts


class _ReasoningItem(_Item):
    type: Literal["reasoning"]
    content: _Texts = Field([])
    summary: _Texts = Field([])


class _CallItem(_Item):
    type: Literal["function_call"]
    name: NonEmptyText
    call_id: NonEmptyText
    arguments: str | None = None


class _OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: NonEmptyText
    output: _Texts


_InputItem = Annotated[
    _MessageItem | _ReasoningItem | _CallItem | _OutputItem, Field(discriminator="type")
]


def _list_items(value: Any) -> Any:
    """The items of an input: a text is a message of the user, what has a role is a message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [
        {"type": "message", **item} if isinstance(item, dict) and "role" in item else item
        for item in value
    ]


class _Tool(Function, CheckedFields):
    # About code which calls tools.
    neutral = frozenset({"output_schema"})
    unused: ClassVar = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
    }
    type: Literal["function"]


class _StreamOptions(CheckedFields):
    neutral = frozenset({"include_obfuscation"})


class _Text(CheckedFields):
    format: dict[str, Any] = Field({"type": "text"})
    verbosity: Verbosity = "medium"


class _Reasoning(CheckedFields):
    unused: ClassVar = {"mode": ("standard",), "context": ("auto",)}
    effort: Effort | None = None
    summary: _Summary | None = None
    generate_summary: _Summary | None = Field(None, exclude=True)


class _Body(RequestBody):
    """What is not excluded is repeated in the reply."""

    neutral = NEUTRAL_KEYS
    unused: ClassVar = {"background": (False,), "context_management": ([],)}
    # All but the logprobs belong to built-in tools and to reasoning that a provider hides, so
    # nothing of theirs is ever there.
    include: list[
        Literal[
            "message.output_text.logprobs",
            "code_interpreter_call.outputs",
            "computer_call_output.output.image_url",
            "file_search_call.results",
            "message.input_image.image_url",
            "reasoning.encrypted_content",
            "web_search_call.action.sources",
            "web_search_call.results",
        ]
    ] = Field([], exclude=True)
    input: Annotated[list[_InputItem], BeforeValidator(_list_items)] = Field([], exclude=True)
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    # Counts built-in tools only.
    max_tool_calls: Annotated[int | None, Field(ge=0)] = None
    metadata: dict[str, str] = Field({}, max_length=16)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: _Reasoning = Field(default_factory=_Reasoning)
    safety_identifier: str | None = None
    store: bool = True
    stream_options: _StreamOptions = Field(_StreamOptions(), exclude=True)
    text: _Text = Field(default_factory=_Text)
    tool_choice: Any = "auto"
    tools: list[_Tool] = Field([], max_length=1024, exclude=True)
    top_logprobs: TopLogprobs = 0
    # "auto" would drop items where the input is too long; that stays an error.
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ModelRequest):
    """A request, and what its reply repeats of it."""

    echo: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the reply that say what was asked."""
    summarize: bool = False
    """True: reasoning is shown as a summary, not as the item's content."""


def _build_messages(fields: _Body, session: Session) -> tuple[Message, ...]:
    """Instructions, the conversation of the previous response, and the input."""
    messages: list[Message] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if fields.previous_response_id:
        previous = _find_response(session, fields.previous_response_id)
        if previous is None:
            raise RequestError(
                f"Previous response with id {fields.previous_response_id!r:.80} not found: in this "
                "session there is no completed response of that id.",
                "previous_response_id",
                "previous_response_not_found",
            )
        # Without the instructions: each response has its own.
        messages += [m for n, m in enumerate(previous.messages) if n or m["role"] != "system"]
        messages.append(previous.reply or {"role": "assistant", "content": ""})
    messages += _read_items(fields.input, session)
    if not messages or not (fields.input or fields.previous_response_id):
        raise RequestError("input must be text or a list of at least one item", "input")
    return tuple(messages)


def _find_response(session: Session, response_id: str) -> Interaction | None:
    return session.find_completed(response_id) if response_id.startswith(_ID_PREFIX) else None


def _read_items(items: Sequence[_InputItem], session: Session) -> list[Message]:
    messages: list[Message] = []
    turn: _Turn | None = None
    for item in items:
        if isinstance(item, _OutputItem):
            results = messages if turn is None else turn.results
            content = _build_content(item.output)
            results.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            continue
        is_user = isinstance(item, _MessageItem) and item.role != "assistant"
        found = _ITEM_ID.fullmatch(item.id or "")
        response_id = f"{_ID_PREFIX}{found[1]}" if found else ""
        if turn is not None and (is_user or not turn.takes(item.type, response_id)):
            messages += turn.build_messages()
            turn = None
        if isinstance(item, _MessageItem) and is_user:
            # "system" is kept for the instructions, which the next response does not take over.
            role = "developer" if item.role == "system" else item.role
            messages.append({"role": role, "content": _build_content(item.content)})
        else:
            turn = turn or _Turn()
            turn.add(item, response_id, session)
    return messages + (turn.build_messages() if turn is not None else [])


@dataclass(slots=True)
class _Turn:
    """The output items of one turn, as far as they have come."""

    response_id: str = ""
    """Empty: no item's id has said it yet."""
    reasoning: str = ""
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """Of its calls; some agents send each right after its call."""

    def takes(self, kind: str, response_id: str) -> bool:
        """Whether a further item of ``kind`` belongs to this turn."""
        if response_id and self.response_id:
            return response_id == self.response_id
        if self.results:
            return False
        if kind == "reasoning":
            return not self.texts and not self.calls
        # Two messages in a row are two turns, unless calls show that one continues.
        return kind == "function_call" or not self.texts or bool(self.calls)

    def add(
        self, item: _MessageItem | _ReasoningItem | _CallItem, response_id: str, session: Session
    ) -> None:
        self.response_id = self.response_id or response_id
        if isinstance(item, _MessageItem):
            self.texts += item.content
        elif isinstance(item, _CallItem):
            function = {"name": item.name, "arguments": item.arguments or "{}"}
            self.calls.append({"id": item.call_id, "type": "function", "function": function})
        else:
            shown = "".join(item.content) or "".join(item.summary)
            # Some frameworks send reasoning back by its id alone.
            interaction = _find_response(session, response_id)
            reply = (interaction.reply if interaction is not None else None) or {}
            self.reasoning += shown or str(reply.get("reasoning_content") or "")

    def build_messages(self) -> list[Message]:
        message = build_assistant_message("".join(self.texts), self.calls, self.reasoning)
        return [message, *self.results]


def _build_content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


class ResponsesProtocol:
    """OpenAI's responses; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

    path = "/v1/responses"
    id_prefix = _ID_PREFIX

    def parse(self, body: dict[str, Any], session: Session) -> ResponsesRequest:
        """The request; the session's sampling holds where the body says nothing."""
        fields = validate(_Body, body)
        given, wanted = body.get("tools") or (), fields.text.format
        tools = tuple(tool.build_tool() for tool in fields.tools)
        rules, parse_calls = build_rules(
            *parse_tool_choice(fields.tool_choice),
            tools,
            parallel=fields.parallel_tool_calls,
            response_format=parse_format(wanted, wanted, "text.format"),
        )
        sampling = fields.build_sampling(
            session.sampling, fields.max_output_tokens, num_top_logprobs=fields.top_logprobs
        )
        return ResponsesRequest(
            messages=_build_messages(fields, session),
            inputs=fields.build_template_inputs(tools, fields.reasoning.effort),
            sampling=sampling,
            rules=rules,
            stream=fields.stream,
            logprobs=_LOGPROBS in fields.include or fields.top_logprobs > 0,
            parse_tools=parse_calls,
            echo={
                **fields.model_dump(),
                "background": False,
                "service_tier": "default",
                "temperature": sampling.temperature,
                "tools": [{"parameters": None, "strict": None, **tool} for tool in given],
                "top_p": sampling.top_p,
            },
            summarize=bool(fields.reasoning.summary or fields.reasoning.generate_summary),
        )

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``response``."""
        [choice] = choices
        reply = choice.interaction.reply or {}
        parsed = ParsedText(
            content=reply.get("content") or "",
            tool_calls=list(reply.get("tool_calls") or ()),
            reasoning=reply.get("reasoning_content") or "",
        )
        writer = ResponseWriter(calls)
        logprobs = [t for part in (choice.generation, None) for t in writer.read_logprobs(part)]
        writer.list_events(parsed, logprobs)
        return writer.list_last_events(choice)[-1]["response"]

    def open_writer(self, calls: ModelCalls) -> ResponseWriter:
        """Writes events in the order of OpenAI's, numbered from 0."""
        return ResponseWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object; what chat completions call otherwise gets this API's name."""
        body = ChatProtocol().format_error(problem)
        param = problem.param
        if param == "messages":
            body["error"]["param"] = "input"
        elif param is not None and param.startswith("response_format"):
            for key in ("message", "param"):
                body["error"][key] = body["error"][key].replace("response_format", "text.format")
        return body


class ResponseWriter:
    """Writes the events of one reply, and its output items.

    An item ends before the next begins: reasoning, text and calls alternate as they were
    sampled.
    """

    def __init__(self, calls: ModelCalls) -> None:
        assert isinstance(calls.request, ResponsesRequest)
        self._calls = calls
        self._request = calls.request
        self._logprobs: TextLogprobs | None = None
        if calls.request.logprobs:
            self._logprobs = TextLogprobs(calls.template, calls.open_reader(calls.calls[0]))
        self._num_events = 0
        self._open: _OpenItem | None = None
        self._output: list[Item] = []
        """The items that have ended."""

    def begin_choice(self, index: int) -> bytes:
        """The events of the beginning: a response has one choice."""
        del index
        response = self._build_response("in_progress")
        names = ("response.created", "response.in_progress")
        return self._format({"type": name, "response": response} for name in names)

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """The events for what the reply got."""
        del index
        return self._format(self.list_events(parsed, self.read_logprobs(generation)))

    def end_choice(self, choice: Choice) -> bytes:
        """The events of the end."""
        return self._format(self.list_last_events(choice))

    def end(self) -> bytes:
        """Nothing: the last event said so."""
        return b""

    def fail(self, problem: Problem) -> bytes:
        """``response.failed``, and an ``error`` event, at which clients stop."""
        reason = {"code": "server_error", "message": problem.message}
        error = ResponsesProtocol().format_error(problem)["error"]
        response = self._build_response("failed", error=reason)
        return self._format(
            [
                {"type": "response.failed", "response": response},
                {**error, "type": "error", "error": error},
            ]
        )

    def read_logprobs(self, generation: Generation | None) -> list[Any]:
        """Those of further text, where they were asked for; None: no more tokens will come."""
        if self._logprobs is None:
            return []
        return self._logprobs.feed(generation) if generation else self._logprobs.finish()

    def list_events(self, parsed: ParsedText, logprobs: Sequence[Any]) -> list[Event]:
        """The events for what is new; ``logprobs`` are those of its text."""
        events: list[Event] = []
        if parsed.reasoning:
            kind: _Growing = "summary" if self._request.summarize else "reasoning"
            item, begun = self._switch_to(kind)
            events += [*begun, item.extend(parsed.reasoning, [])]
        if parsed.content:
            item, begun = self._switch_to("message")
            events += [*begun, item.extend(parsed.content, logprobs)]
        for call in parsed.tool_calls:
            events += self._close("completed")
            events += self._list_call_events(call)
        return events

    def list_last_events(self, choice: Choice) -> list[Event]:
        """The events of the end, the last of which holds the response."""
        is_cut = choice.generation.finish_reason == "length"
        status: Status = "incomplete" if is_cut else "completed"
        # A reply of nothing has one empty message.
        is_empty = self._open is None and not self._output
        events = [*(self._switch_to("message")[1] if is_empty else ()), *self._close(status)]
        num_tokens = len(choice.generation.completion_ids)
        num_reasoning_tokens = count_reasoning_tokens(
            self._calls.template, choice.generation, choice.interaction.reply
        )
        response = self._build_response(
            status,
            usage={
                "input_tokens": self._calls.num_prompt_tokens,
                # What an engine had cached is not known here.
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": num_tokens,
                "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
                "total_tokens": self._calls.num_prompt_tokens + num_tokens,
            },
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
        )
        return [*events, {"type": f"response.{status}", "response": response}]

    def _build_response(self, status: str, **more: Any) -> dict[str, Any]:
        """A ``response`` object; ``more`` are its fields that depend on how it ended."""
        return {
            "id": self._calls.id,
            "object": "response",
            "created_at": self._calls.created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._calls.engine.model_name,
            "output": list(self._output),
            "usage": None,
            **self._request.echo,
            **more,
        }

    def _format(self, events: Iterable[Event]) -> bytes:
        """Server-sent events, named after their types and numbered."""
        lines = []
        for event in events:
            numbered = {**event, "sequence_number": self._num_events}
            data = json.dumps(numbered, ensure_ascii=False)
            lines.append(f"event: {event['type']}\ndata: {data}\n\n")
            self._num_events += 1
        return "".join(lines).encode()

    def _switch_to(self, kind: _Growing) -> tuple[_OpenItem, list[Event]]:
        """The open item of that kind, and the events that open it if none was open."""
        if self._open is not None and self._open.kind == kind:
            return self._open, []
        events = self._close("completed")
        item_id = self._build_item_id("msg" if kind == "message" else "rs")
        self._open = _OpenItem(kind, item_id, len(self._output))
        return self._open, events + self._open.begin()

    def _close(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        item, events = self._open.end(status)
        self._output.append(item)
        self._open = None
        return events

    def _build_item_id(self, prefix: str) -> str:
        """The id of the next output item; :data:`_ITEM_ID` matches it."""
        return f"{prefix}_{self._calls.id.removeprefix(_ID_PREFIX)}_{len(self._output)}"

    def _list_call_events(self, call: Mapping[str, Any]) -> list[Event]:
        index = len(self._output)
        function = call["function"]
        item = {
            "id": self._build_item_id("fc"),
            "type": "function_call",
            "status": "completed",
            "arguments": function["arguments"],
            "call_id": call["id"],
            "name": function["name"],
        }
        self._output.append(item)
        place = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        prefix = "response.function_call_arguments"
        return [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": f"{prefix}.delta", **place, "delta": item["arguments"]},
            {"type": f"{prefix}.done", **place, **function},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]


class _OpenItem:
    """A message or reasoning item that still grows."""

    def __init__(self, kind: _Growing, item_id: str, index: int) -> None:
        self.kind = kind
        self._id = item_id
        self._index = index
        self._text = ""
        self._logprobs: list[Any] = []
        self._text_name, self._part_name, self._part_type, where = _NAMES[kind]
        self._place = {"item_id": item_id, "output_index": index, where: 0}

    def begin(self) -> list[Event]:
        added = {"type": "response.output_item.added", "output_index": self._index}
        return [
            {**added, "item": self._build_item("in_progress", [])},
            {"type": f"{self._part_name}.added", **self._place, "part": self._build_part()},
        ]

    def extend(self, text: str, logprobs: Sequence[Any]) -> Event:
        self._text += text
        self._logprobs += logprobs
        delta = {"type": f"{self._text_name}.delta", **self._place, "delta": text}
        return delta | ({"logprobs": list(logprobs)} if self.kind == "message" else {})

    def end(self, status: Status) -> tuple[Item, list[Event]]:
        part = self._build_part()
        said: Event = {key: part[key] for key in ("text", "logprobs") if key in part}
        item = self._build_item(status, [part])
        return item, [
            {"type": f"{self._text_name}.done", **self._place, **said},
            {"type": f"{self._part_name}.done", **self._place, "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def _build_part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._part_type, "text": self._text}
        if self.kind == "message":
            part |= {"annotations": [], "logprobs": list(self._logprobs)}
        return part

    def _build_item(self, status: str, parts: list[dict[str, Any]]) -> Item:
        item: Item = {"id": self._id, "status": status}
        if self.kind == "message":
            return item | {"type": "message", "role": "assistant", "content": parts}
        summary, content = (parts, []) if self.kind == "summary" else ([], parts)
        item |= {"type": "reasoning", "summary": summary, "content": content}
        return item | {"encrypted_content": None}
