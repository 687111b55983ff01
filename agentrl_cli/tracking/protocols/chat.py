"""``/v1/chat/completions``: JSON bodies to checked requests, sampled replies to JSON and chunks.

What cannot be honoured is refused, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.records import Message, SharedSequence
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.message_meaning import MessageHistory
from agentrl_cli.tracking.model_calls import (
    Choice,
    ModelCalls,
    count_reasoning_tokens,
    format_token_logprobs,
)
from agentrl_cli.tracking.protocols.model_request import (
    NEUTRAL_KEYS,
    CheckedFields,
    Effort,
    Function,
    Limit,
    ModelRequest,
    Problem,
    RequestBody,
    RequestError,
    RequestFields,
    Stops,
    Tool,
    TopLogprobs,
    Verbosity,
    build_rules,
    parse_format,
    parse_tool_choice,
    texts_of,
    validate,
)
from agentrl_cli.tracking.session import Session

_NO_PREFILL = "the model begins a turn of its own, and cannot continue a given one (no prefill)"
#: Keys of messages that cannot be honoured, and what says the same.
_UNREAD_MESSAGE_KEYS: Mapping[str, str] = {
    "audio": "send its transcript as content",
    "function_call": "use tool_calls, and role 'tool' for the result",
    "partial": _NO_PREFILL,
    "prefix": _NO_PREFILL,
    "refusal": "send it as content",
}


class _CalledFunction(RequestFields):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(RequestFields):
    id: str | None = None
    function: _CalledFunction


class _Message(RequestFields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[str], texts_of("text")] = Field([])
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Tool(RequestFields):
    type: Literal["function"]
    function: Function


class _Conversation(RequestFields):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: Annotated[list[_Tool], Field(max_length=1024)] | None = None


class _StreamOptions(CheckedFields):
    # Obfuscation pads events against eavesdroppers, who do not exist on a loopback socket.
    neutral = frozenset({"include_obfuscation"})
    include_usage: bool = False


class _Body(_Conversation, RequestBody):
    neutral = NEUTRAL_KEYS | {"store"}
    unused: ClassVar = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "top_k": (0, -1),
        "min_p": (0,),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "modalities": (["text"],),
        "functions": ([],),
        "function_call": ("none", "auto"),
    }
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    stream_options: _StreamOptions = Field(default_factory=_StreamOptions)
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Stops = Field([])
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    return_token_ids: bool = False
    response_format: dict[str, Any] = Field({"type": "text"})
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None


def parse_conversation(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """The checked messages and tools of a request body, as they were sent.

    Raises:
        RequestError: naming the message or the tool that is wrong.
    """
    validate(_Conversation, body)
    return tuple(body["messages"]), tuple(body.get("tools") or ())


def _validate_new(body: dict[str, Any], session: Session) -> tuple[_Body, MessageHistory]:
    """The body, and its messages that are known from earlier requests, which were valid."""
    messages = body.get("messages")
    known = session.tree.find_known(messages if isinstance(messages, list) else ())
    with suppress(RequestError):
        if known:
            return validate(_Body, {**body, "messages": body["messages"][len(known) - 1 :]}), known
    # An error names the place among all messages.
    return validate(_Body, body), known


class ChatProtocol:
    """OpenAI's chat completions; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; the session's sampling holds where the body says nothing."""
        fields, known = _validate_new(body, session)
        tools = tuple(body.get("tools") or ())
        new = tuple(body["messages"][len(known) :])
        for index, message in enumerate(new, len(known)):
            for key, remedy in _UNREAD_MESSAGE_KEYS.items():
                if message.get(key):
                    where = f"messages[{index}].{key}"
                    raise RequestError(f"{where} is not supported here; {remedy}", where)
        if fields.top_logprobs and not fields.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        wanted = fields.response_format
        rules, parse_calls = build_rules(
            *parse_tool_choice(fields.tool_choice),
            tools,
            parallel=fields.parallel_tool_calls,
            response_format=parse_format(wanted, wanted.get("json_schema"), "response_format"),
        )
        return ModelRequest(
            messages=SharedSequence(new, known),
            inputs=fields.build_template_inputs(tools, fields.reasoning_effort),
            sampling=fields.build_sampling(
                session.sampling,
                fields.max_tokens,
                fields.max_completion_tokens,
                stop=fields.stop,
                seed=fields.seed,
                num_top_logprobs=fields.top_logprobs,
            ),
            rules=rules,
            num_choices=fields.n,
            stream=fields.stream,
            include_usage=fields.stream_options.include_usage,
            logprobs=fields.logprobs,
            token_ids=fields.return_token_ids,
            parse_tools=parse_calls,
        )

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``chat.completion``."""
        formatted = [
            {
                "index": choice.index,
                "message": {"refusal": None, **(choice.interaction.reply or {})},
                "logprobs": None,
                "finish_reason": choice.interaction.finish_reason or "",
                **_format_tokens(calls, choice.generation),
            }
            for choice in choices
        ]
        envelope = _format_envelope(calls, "chat.completion", formatted)
        return envelope | {"usage": _format_usage(calls, choices), **_format_prompt(calls)}

    def open_writer(self, calls: ModelCalls) -> ChunkWriter:
        """Writes ``chat.completion.chunk`` events, and the end mark."""
        return ChunkWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": problem.message, "type": problem.kind}
        return {"error": {**error, "param": problem.param, "code": problem.code}}


class ChunkWriter:
    """Writes the chunks of one streamed reply."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._num_tool_calls: dict[int, int] = {}
        self._choices: list[Choice] = []

    def begin_choice(self, index: int) -> bytes:
        """The chunk that opens a choice; as vLLM's, the very first has the prompt's ids."""
        prompt = {} if self._num_tool_calls else _format_prompt(self._calls)
        self._num_tool_calls[index] = 0
        return self._write_delta(index, {"role": "assistant", "content": ""}, **prompt)

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """The chunks for what a choice got; none where nothing can be shown yet."""
        tokens = {} if generation is None else _format_tokens(self._calls, generation)
        deltas = self._build_deltas(index, parsed)
        if tokens and not deltas:
            deltas = [{}]
        chunks = []
        for delta in deltas:
            chunks.append(self._write_delta(index, delta, tokens))
            tokens = {}
        return b"".join(chunks)

    def end_choice(self, choice: Choice) -> bytes:
        """The last chunk of a choice."""
        self._choices.append(choice)
        reason = {"finish_reason": choice.interaction.finish_reason}
        return self._write_delta(choice.index, {}, reason)

    def end(self) -> bytes:
        """Usage, where it is asked for, and the end mark."""
        usage = b""
        if self._calls.request.include_usage:
            usage = self._write([], _format_usage(self._calls, self._choices))
        return usage + b"data: [DONE]\n\n"

    def fail(self, problem: Problem) -> bytes:
        """The error as an event."""
        return format_event(ChatProtocol().format_error(problem))

    def _build_deltas(self, index: int, parsed: ParsedText) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if parsed.reasoning:
            deltas.append({"reasoning_content": parsed.reasoning})
        if parsed.content:
            deltas.append({"content": parsed.content})
        for call in parsed.tool_calls:
            number = self._num_tool_calls[index]
            self._num_tool_calls[index] += 1
            deltas.append({"tool_calls": [{"index": number, **call}]})
        return deltas

    def _write_delta(
        self,
        index: int,
        delta: dict[str, Any],
        told: dict[str, Any] | None = None,
        **prompt: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._write([choice | (told or {})], None, **prompt)

    def _write(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, **prompt: Any
    ) -> bytes:
        """One chunk; where usage is asked for, all but the last say null."""
        chunk = _format_envelope(self._calls, "chat.completion.chunk", choices) | prompt
        return format_event(chunk | ({"usage": usage} if self._calls.request.include_usage else {}))


def format_event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def _format_envelope(calls: ModelCalls, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": calls.id,
        "object": kind,
        "created": calls.created,
        "model": calls.engine.model_name,
        "choices": choices,
    }


def _format_tokens(calls: ModelCalls, generation: Generation) -> dict[str, Any]:
    """What was asked of a choice's tokens: their logprobs, and their ids as vLLM gives them."""
    tokens: dict[str, Any] = {}
    if calls.request.logprobs:
        content = format_token_logprobs(calls.template, generation)
        tokens["logprobs"] = {"content": content, "refusal": None}
    if calls.request.token_ids:
        tokens["token_ids"] = list(generation.completion_ids)
    return tokens


def _format_prompt(calls: ModelCalls) -> dict[str, Any]:
    if not calls.request.token_ids:
        return {}
    return {"prompt_token_ids": list(calls.calls[0].plan.prompt_ids)}


def _format_usage(calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's token counts."""
    num_tokens = sum(len(choice.generation.completion_ids) for choice in choices)
    num_reasoning_tokens = sum(
        count_reasoning_tokens(calls.template, choice.generation, choice.interaction.reply)
        for choice in choices
    )
    return {
        "prompt_tokens": calls.num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": calls.num_prompt_tokens + num_tokens,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }
