"""``/v1/messages``: Anthropic's messages and blocks become chat messages, and replies messages.

An assistant's turn is one message whatever the order of its blocks: texts are put together,
so is reasoning, and calls keep their order. A reply that was streamed as text, call, text and
one that was sent as text, call therefore come back as the same turn.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.model_calls import Choice, ModelCalls
from agentrl_cli.tracking.protocols.model_request import (
    CheckedFields,
    Effort,
    Function,
    Limit,
    ModelRequest,
    NonEmptyText,
    NotFoundError,
    Problem,
    RequestBody,
    RequestError,
    RequestFields,
    Stops,
    Tool,
    build_assistant_message,
    build_rules,
    texts_of,
    validate,
)
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
_SIGNATURE_PREFIX = "agentrl-"
#: Claude Code's first line of the system prompt. Its hash differs in every request, so that no
#: request would continue an earlier one; Anthropic does not show it to the model either.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
#: ``hidden``: it was not asked for; ``omitted``: its signature stands for it.
ThinkingDisplay = Literal["shown", "omitted", "hidden"]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


_Texts = Annotated[list[str], texts_of("text")]


class _TextBlock(RequestFields):
    type: Literal["text"]
    text: str


class _ResultBlock(RequestFields):
    type: Literal["tool_result"]
    tool_use_id: NonEmptyText
    content: _Texts = Field([])
    is_error: bool | None = None


class _CallBlock(RequestFields):
    type: Literal["tool_use"]
    id: NonEmptyText
    name: NonEmptyText
    input: dict[str, Any] | None = None


class _ThinkingBlock(RequestFields):
    type: Literal["thinking"]
    thinking: str | None = None
    signature: str | None = None


class _RedactedBlock(RequestFields):
    """Another model's thinking, which is not to be read."""

    type: Literal["redacted_thinking"]


_UserBlock = Annotated[_TextBlock | _ResultBlock, Field(discriminator="type")]
_AssistantBlock = Annotated[
    _TextBlock | _CallBlock | _ThinkingBlock | _RedactedBlock, Field(discriminator="type")
]


class _UserMessage(RequestFields):
    role: Literal["user"]
    content: Annotated[list[_UserBlock], BeforeValidator(_as_blocks)]


class _AssistantMessage(RequestFields):
    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], BeforeValidator(_as_blocks)]


class _SystemMessage(RequestFields):
    role: Literal["system"]
    content: _Texts


class _Tool(Function, CheckedFields):
    # How Anthropic stores, caches or streams it.
    neutral = frozenset({"cache_control", "eager_input_streaming"})
    unused: ClassVar = {
        "defer_loading": (False,),
        "allowed_callers": (["direct"],),
        "input_examples": ([],),
    }
    type: Literal["custom"] = "custom"
    parameters: dict[str, Any] | None = Field(alias="input_schema")


class _ToolChoice(RequestFields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Format(RequestFields):
    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class _OutputConfig(CheckedFields):
    effort: Effort | None = None
    format: _Format | None = None


class _Thinking(RequestFields):
    type: Literal["adaptive", "between_tools", "disabled", "enabled"]
    display: Literal["summarized", "omitted"] | None = None
    # A part of max_tokens; when to stop thinking is up to the model.
    budget_tokens: Limit | None = None


class _Thread(RequestFields):
    type: Literal["create", "continue"] | None = None
    previous_message_id: str | None = None


class _Body(RequestBody):
    # Bookkeeping, billing, routing, caching, and what another model should do when this one
    # declines, which it never does.
    neutral = frozenset(
        {
            "model",
            "metadata",
            "service_tier",
            "speed",
            "inference_geo",
            "cache_control",
            "diagnostics",
            "fallbacks",
            "fallback_credit_token",
            "billing_policy",
            "user_profile_id",
            "workspace_id",
        }
    )
    unused: ClassVar = {
        "top_k": (0, -1),
        "mcp_servers": ([],),
        "context_management": ({}, {"edits": []}),
    }
    messages: Annotated[
        list[
            Annotated[
                _UserMessage | _AssistantMessage | _SystemMessage, Field(discriminator="role")
            ]
        ],
        Field(min_length=1),
    ]
    system: _Texts = Field([])
    tools: list[_Tool] = Field([], max_length=1024)
    tool_choice: _ToolChoice = Field(default_factory=lambda: _ToolChoice(type="auto"))
    max_tokens: Limit | None = None
    stop_sequences: Stops = Field([])
    thinking: _Thinking | None = None
    output_config: _OutputConfig = Field(default_factory=_OutputConfig)
    thread: _Thread | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest(ModelRequest):
    """A checked request, with what the reply's form depends on."""

    thinking: ThinkingDisplay = "hidden"
    stop_sequences: tuple[str, ...] = ()
    """The request's own; the session may have others."""


def _build_conversation(
    fields: _Body, session: Session
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """The whole conversation and its tools, those that a thread holds included."""
    messages = _build_messages(fields, session)
    continued = _find_continued(fields, session)
    if continued is None:
        messages = [*_build_system(fields.system), *messages]
        tools = tuple(tool.build_tool() for tool in fields.tools)
    else:
        assert continued.reply is not None
        messages = [*continued.messages, continued.reply, *messages]
        tools = continued.tools
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages must end with a message of the user: the model begins a turn of its own, "
            "and cannot continue a given one (no prefill)",
            "messages",
        )
    return tuple(messages), tools


def _find_continued(fields: _Body, session: Session) -> Interaction | None:
    """The turn that a thread continues: the server holds what came before.

    Any turn of the session will do, created as a thread or not, and more than once.
    """
    if fields.thread is None or fields.thread.type == "create":
        return None
    previous_id = fields.thread.previous_message_id or ""
    for key in ("system", "tools"):
        if key in fields.model_fields_set:
            raise RequestError(
                f"{key} stays as it was when the thread was created; leave it out, or send the "
                "whole conversation with thread: {'type': 'create'}",
                key,
            )
    previous = session.find_completed(previous_id)
    if previous is not None:
        return previous
    raise NotFoundError(
        f"thread.previous_message_id {previous_id!r:.80} is no reply of this session; send the "
        "whole conversation with thread: {'type': 'create'}",
        "thread.previous_message_id",
        code="thread_not_found",
    )


def sign_thinking(thinking: str) -> str:
    """The signature of a thinking block, by which it is known when its text was left out."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24)
    return f"{_SIGNATURE_PREFIX}{digest.hexdigest()}"


def _find_thinking(session: Session, signature: str) -> str:
    """The thinking of an earlier reply that was sent as its signature alone; empty: unknown."""
    for interaction in session.interactions:
        thinking = (interaction.reply or {}).get("reasoning_content")
        if thinking and sign_thinking(thinking) == signature:
            return str(thinking)
    return ""


def _build_system(texts: Sequence[str]) -> list[Message]:
    """The system prompt as a message; none if it is empty."""
    shown = [_BILLING_HEADER.sub("", text) for text in texts]
    content = "".join(shown)
    return [{"role": "system", "content": content}] if content else []


def _build_messages(fields: _Body, session: Session) -> list[Message]:
    """Chat messages in OpenAI's form; to Anthropic, consecutive ones of one role are one turn."""
    messages: list[Message] = []
    for role, group in itertools.groupby(fields.messages, lambda message: message.role):
        turn: list[Any] = [message.content for message in group]
        content = [part for parts in turn for part in parts]
        if role == "user":
            messages += _build_user(content)
        elif role == "assistant":
            messages.append(_build_assistant(content, session))
        else:
            messages += [message for parts in turn for message in _build_system(parts)]
    return messages


def _build_user(blocks: Sequence[_UserBlock]) -> list[Message]:
    """Results of tools become messages of their own, the texts between them the user's."""
    messages: list[Message] = []
    texts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, _ResultBlock):
            texts = []
            text = "\n".join(block.content)
            # Templates cannot express a failed tool, and the model must not mistake this for a
            # result.
            if block.is_error and not text.lower().startswith("error"):
                text = f"Error: {text}"
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            continue
        texts.append({"type": "text", "text": block.text})
        if len(texts) == 1:
            messages.append({"role": "user", "content": block.text})
        else:
            # How parts are joined is the template's.
            messages[-1]["content"] = texts
    return messages or [{"role": "user", "content": ""}]


def _build_assistant(blocks: Sequence[_AssistantBlock], session: Session) -> Message:
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, _TextBlock):
            content += block.text
        elif isinstance(block, _ThinkingBlock):
            reasoning += block.thinking or _find_thinking(session, block.signature or "")
        elif isinstance(block, _CallBlock):
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
    return build_assistant_message(content, calls, reasoning)


class MessagesProtocol:
    """Anthropic's messages; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; the session's sampling holds where the body says nothing."""
        fields = validate(_Body, body)
        messages, tools = _build_conversation(fields, session)
        choice, output = fields.tool_choice, fields.output_config
        response_format = None
        if output.format is not None:
            schema = {"name": "output", "schema": output.format.definition, "strict": True}
            response_format = {"type": "json_schema", "json_schema": schema}
        rules, parse_calls = build_rules(
            {"any": "required", "tool": "required"}.get(choice.type, choice.type),
            (choice.name or "",) if choice.type == "tool" else None,
            tools,
            parallel=not choice.disable_parallel_tool_use,
            response_format=response_format,
        )
        # An agent that did not ask for thinking reads the first block as text, so it gets none;
        # the model still thinks as its template has it. Templates know one of two names, or none.
        display: ThinkingDisplay = "hidden"
        kwargs: dict[str, Any] = {}
        if fields.thinking is not None:
            is_wanted = fields.thinking.type != "disabled"
            kwargs = {"enable_thinking": is_wanted, "thinking": is_wanted}
            if is_wanted:
                display = "omitted" if fields.thinking.display == "omitted" else "shown"
        return MessagesRequest(
            messages=messages,
            inputs=fields.build_template_inputs(tools, output.effort, **kwargs),
            sampling=fields.build_sampling(
                session.sampling, fields.max_tokens, stop=fields.stop_sequences
            ),
            rules=rules,
            stream=fields.stream,
            parse_tools=parse_calls,
            thinking=display,
            stop_sequences=tuple(fields.stop_sequences),
        )

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``message``."""
        [choice] = choices
        assert isinstance(calls.request, MessagesRequest)
        blocks = _format_blocks(choice.interaction.reply or {}, calls.request.thinking)
        message = _format_message(calls, blocks, len(choice.generation.completion_ids))
        return message | _find_stop(choice, calls.request)

    def open_writer(self, calls: ModelCalls) -> EventWriter:
        """Writes ``message_start``, the events of each content block, and the end."""
        return EventWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """Anthropic's error object; ``details`` hold a code where there is one."""
        error: dict[str, Any] = {
            "type": _ERROR_TYPES.get(problem.status, "invalid_request_error"),
            "message": problem.message,
        }
        if problem.code is not None:
            error["details"] = {"error_code": problem.code}
        return {"type": "error", "error": error, "request_id": f"req_{uuid.uuid4().hex[:24]}"}


class CountTokensProtocol(MessagesProtocol):
    """Counts the prompt that a message would have, and records nothing."""

    path = "/v1/messages/count_tokens"

    def format_count(self, num_prompt_tokens: int) -> dict[str, Any]:
        """The tokens of the prompt, those of earlier turns as they were sampled."""
        return {"input_tokens": num_prompt_tokens}


class EventWriter:
    """Writes the events of one streamed reply: its content blocks one after the other."""

    def __init__(self, calls: ModelCalls) -> None:
        assert isinstance(calls.request, MessagesRequest)
        self._calls = calls
        self._request = calls.request
        self._index = -1
        self._open: str | None = None
        """The type of the block that more may be added to."""
        self._thinking = ""
        """Of the open block."""

    def begin_choice(self, index: int) -> bytes:
        """``message_start``: a message has one choice."""
        del index
        message = _format_message(self._calls, [], 0)
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
        delta = format_event(
            "message_delta",
            delta=_find_stop(choice, self._request),
            usage={"output_tokens": len(choice.generation.completion_ids)},
        )
        return b"".join([*self._end_block(), delta])

    def end(self) -> bytes:
        """``message_stop``."""
        return format_event("message_stop")

    def fail(self, problem: Problem) -> bytes:
        """The error as an event."""
        return format_event(**MessagesProtocol().format_error(problem))

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


def format_event(type: str, **data: Any) -> bytes:
    """A server-sent event."""
    text = json.dumps({"type": type, **data}, ensure_ascii=False)
    return f"event: {type}\ndata: {text}\n\n".encode()


def _format_message(calls: ModelCalls, blocks: list[Block], num_tokens: int) -> dict[str, Any]:
    """A message that still grows."""
    return {
        "id": calls.id,
        "type": "message",
        "role": "assistant",
        "model": calls.engine.model_name,
        "content": blocks,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": calls.num_prompt_tokens,
            # Nothing is billed, so nothing counts as cached.
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": num_tokens,
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


def _find_stop(choice: Choice, request: MessagesRequest) -> dict[str, str | None]:
    """Why a reply ended: Anthropic's reason, and the request's stop sequence if that did it."""
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    reason, stop_text = reasons.get(choice.interaction.finish_reason or "", "end_turn"), None
    if reason == "end_turn" and choice.generation.stop_text in request.stop_sequences:
        reason, stop_text = "stop_sequence", choice.generation.stop_text
    return {"stop_reason": reason, "stop_sequence": stop_text}


def _begin_call(call: dict[str, Any]) -> Block:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}
