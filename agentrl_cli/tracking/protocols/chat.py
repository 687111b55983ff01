"""``/v1/chat/completions``: JSON bodies to checked requests, sampled replies to JSON and chunks.

What cannot be honoured is refused, never dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.records import Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.model_calls import (
    Choice,
    ModelCalls,
    count_reasoning_tokens,
    format_token_logprobs,
)
from agentrl_cli.tracking.protocols.model_request import ModelRequest, Problem, RequestError
from agentrl_cli.tracking.protocols.request_fields import (
    EFFORTS,
    MAX_TOP_LOGPROBS,
    NEUTRAL_KEYS,
    VERBOSITIES,
    check_keys,
    drop_nulls,
    parse_format,
    parse_sampling,
    parse_stops,
    parse_template_inputs,
    parse_tool_rules,
    parse_tools,
    take,
    take_choice,
    take_int,
)
from agentrl_cli.tracking.session import Session

_NEUTRAL_KEYS = NEUTRAL_KEYS | {"store", "verbosity"}
_HONOURED_KEYS = frozenset(
    {
        "messages",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "stream",
        "stream_options",
        "n",
        "stop",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "seed",
        "logprobs",
        "top_logprobs",
        "response_format",
        "reasoning_effort",
        "chat_template_kwargs",
    }
)
#: Keys that are accepted only at the value that means "not used".
_UNUSED_VALUES: Mapping[str, tuple[Any, ...]] = {
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
#: Keys of messages that no chat template reads, and what says the same.
_UNREAD_MESSAGE_KEYS: Mapping[str, str] = {
    "audio": "send its transcript as content",
    "function_call": "use tool_calls, and role 'tool' for the result",
    "refusal": "send it as content",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat_request(body: dict[str, Any], defaults: Sampling) -> ModelRequest:
    """The request in a JSON body; ``defaults`` hold where the body says nothing.

    Raises:
        RequestError: naming the key, what was found and what is allowed.
    """
    body = drop_nulls(body)
    check_keys(body, _HONOURED_KEYS, _NEUTRAL_KEYS, _UNUSED_VALUES)
    take_choice(body, "verbosity", VERBOSITIES)
    tools = parse_tools(body)
    rules, parse_calls = parse_tool_rules(body, tools, _parse_response_format(body))
    logprobs = take(body, "logprobs", bool, False)
    num_top_logprobs = take_int(body, "top_logprobs", 0, minimum=0, maximum=MAX_TOP_LOGPROBS)
    if num_top_logprobs and not logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    stop = body.get("stop", [])
    messages = parse_messages(body)
    _check_all_is_read(messages)
    return ModelRequest(
        messages=messages,
        inputs=parse_template_inputs(body, tools, take_choice(body, "reasoning_effort", EFFORTS)),
        sampling=parse_sampling(
            body,
            defaults,
            limits=("max_tokens", "max_completion_tokens"),
            stop=parse_stops([stop] if isinstance(stop, str) else stop, "stop"),
            num_top_logprobs=num_top_logprobs,
        ),
        rules=rules,
        num_choices=take_int(body, "n", 1, minimum=1, maximum=128),
        stream=take(body, "stream", bool, False),
        include_usage=_parse_stream_options(body),
        logprobs=logprobs,
        parse_tools=parse_calls,
    )


def parse_messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """The checked messages of a request body.

    Raises:
        RequestError: naming the message that is wrong.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object", where)
        if message.get("role") not in _ROLES:
            raise RequestError(
                f"{where}.role is {message.get('role')!r:.80}; allowed: {', '.join(_ROLES)}",
                f"{where}.role",
            )
        _check_content(message.get("content"), where)
        for key in ("name", "tool_call_id", "reasoning_content", "reasoning", "refusal"):
            take(message, key, str, "", f"{where}.")
        for index_of_call, call in enumerate(take(message, "tool_calls", list, [], f"{where}.")):
            _check_tool_call(call, f"{where}.tool_calls[{index_of_call}]")
    return tuple(messages)


def _check_all_is_read(messages: tuple[Message, ...]) -> None:
    for index, message in enumerate(messages):
        for key, remedy in _UNREAD_MESSAGE_KEYS.items():
            if message.get(key):
                where = f"messages[{index}].{key}"
                raise RequestError(f"{where} is not supported here; {remedy}", where)


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be text or a list of parts", f"{where}.content")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.content has a part of type {kind!r:.80}; this engine reads text parts "
                "only: no images, no audio, no files",
                f"{where}.content",
            )


def _check_tool_call(call: Any, where: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments") or "", str | dict)
        or not isinstance(call.get("id") or "", str)
    ):
        raise RequestError(
            f"{where} must be {{'id', 'type': 'function', 'function': {{'name', 'arguments'}}}} "
            "with texts",
            where,
        )


def _parse_response_format(body: Mapping[str, Any]) -> dict[str, Any] | None:
    asked = take(body, "response_format", dict, {"type": "text"})
    schema = take(asked, "json_schema", dict, {}, "response_format.")
    return parse_format(asked, schema, "response_format")


def _parse_stream_options(body: Mapping[str, Any]) -> bool:
    """Whether usage is wanted at the end of a stream."""
    options = take(body, "stream_options", dict, {})
    # Obfuscation pads events against eavesdroppers, who do not exist on a loopback socket.
    check_keys(options, ("include_usage",), ("include_obfuscation",), {}, path="stream_options.")
    return take(options, "include_usage", bool, False, "stream_options.")


class ChatProtocol:
    """OpenAI's chat completions; see :class:`~agentrl_cli.tracking.gateway.WireProtocol`."""

    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: dict[str, Any], session: Session) -> ModelRequest:
        """The request; see :func:`parse_chat_request`."""
        return parse_chat_request(body, session.sampling)

    def format_reply(self, calls: ModelCalls, choices: Sequence[Choice]) -> dict[str, Any]:
        """A ``chat.completion``."""
        formatted = [
            {
                "index": choice.index,
                "message": {"refusal": None, **(choice.interaction.reply or {})},
                "logprobs": _format_logprobs(calls, choice.generation),
                "finish_reason": choice.interaction.finish_reason or "",
            }
            for choice in choices
        ]
        usage = _format_usage(calls, choices)
        return _format_envelope(calls, "chat.completion", formatted) | {"usage": usage}

    def open_writer(self, calls: ModelCalls) -> ChunkWriter:
        """Writes ``chat.completion.chunk`` events, and the end mark."""
        return ChunkWriter(calls)

    def format_error(self, problem: Problem) -> dict[str, Any]:
        """OpenAI's error object."""
        return format_error(problem)


class ChunkWriter:
    """Writes the chunks of one streamed reply."""

    def __init__(self, calls: ModelCalls) -> None:
        self._calls = calls
        self._num_tool_calls: dict[int, int] = {}
        self._choices: list[Choice] = []

    def begin_choice(self, index: int) -> bytes:
        """The chunk that opens a choice."""
        self._num_tool_calls[index] = 0
        return self._write_delta(index, {"role": "assistant", "content": ""})

    def write(self, index: int, parsed: ParsedText, generation: Generation | None) -> bytes:
        """The chunks for what a choice got; none where nothing can be shown yet."""
        logprobs = None if generation is None else _format_logprobs(self._calls, generation)
        deltas = self._build_deltas(index, parsed)
        if logprobs is not None and not deltas:
            deltas = [{}]
        chunks = []
        for delta in deltas:
            chunks.append(self._write_delta(index, delta, logprobs=logprobs))
            logprobs = None
        return b"".join(chunks)

    def end_choice(self, choice: Choice) -> bytes:
        """The last chunk of a choice."""
        self._choices.append(choice)
        return self._write_delta(choice.index, {}, choice.interaction.finish_reason)

    def end(self) -> bytes:
        """Usage, where it is asked for, and the end mark."""
        usage = b""
        if self._calls.request.include_usage:
            usage = self._write([], _format_usage(self._calls, self._choices))
        return usage + b"data: [DONE]\n\n"

    def fail(self, problem: Problem) -> bytes:
        """The error as an event."""
        return format_event(format_error(problem))

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
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs}
        return self._write([{**choice, "finish_reason": finish_reason}], None)

    def _write(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        """One chunk; where usage is asked for, all but the last say null."""
        chunk = _format_envelope(self._calls, "chat.completion.chunk", choices)
        return format_event(chunk | ({"usage": usage} if self._calls.request.include_usage else {}))


def format_event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def format_error(problem: Problem) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    error = {"message": problem.message, "type": problem.kind}
    return {"error": {**error, "param": problem.param, "code": problem.code}}


def _format_envelope(calls: ModelCalls, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": calls.id,
        "object": kind,
        "created": calls.created,
        "model": calls.engine.model_name,
        "choices": choices,
    }


def _format_logprobs(calls: ModelCalls, generation: Generation) -> dict[str, Any] | None:
    if not calls.request.logprobs:
        return None
    return {"content": format_token_logprobs(calls.template, generation), "refusal": None}


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
