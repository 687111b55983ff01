"""``/v1/chat/completions``, the way in: a JSON body to a checked request.

What cannot be honoured is refused, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.records import Message
from agentrl_cli.tracking.model_request import ModelRequest, RequestError
from agentrl_cli.tracking.request_fields import check_keys, drop_nulls, take, take_int
from agentrl_cli.tracking.sampling_request import (
    MAX_TOP_LOGPROBS,
    check_verbosity,
    parse_format,
    parse_sampling,
    parse_template_inputs,
    take_effort,
)
from agentrl_cli.tracking.tool_request import parse_tool_rules, parse_tools

#: Keys that change nothing about what is sampled: bookkeeping, routing and caching hints.
_NEUTRAL_KEYS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    }
)
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
_MAX_STOPS = 64


def parse_chat_request(body: dict[str, Any], defaults: Sampling) -> ModelRequest:
    """The request in a JSON body; ``defaults`` hold where the body says nothing.

    Raises:
        RequestError: naming the key, what was found and what is allowed.
    """
    body = drop_nulls(body)
    check_keys(body, _HONOURED_KEYS, _NEUTRAL_KEYS, _UNUSED_VALUES)
    check_verbosity(body)
    tools = parse_tools(body)
    rules, parse_calls = parse_tool_rules(body, tools, _parse_response_format(body))
    logprobs = take(body, "logprobs", bool, False)
    num_top_logprobs = take_int(body, "top_logprobs", 0, minimum=0, maximum=MAX_TOP_LOGPROBS)
    if num_top_logprobs and not logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    messages = parse_messages(body)
    _check_all_is_read(messages)
    return ModelRequest(
        messages=messages,
        inputs=parse_template_inputs(body, tools, take_effort(body, "reasoning_effort")),
        sampling=parse_sampling(
            body,
            defaults,
            limits=("max_tokens", "max_completion_tokens"),
            stop=_parse_stop(body),
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


def _parse_stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(texts, list)
        or len(texts) > _MAX_STOPS
        or not all(isinstance(t, str) and t for t in texts)
    ):
        raise RequestError(
            f"stop must be a text or a list of at most {_MAX_STOPS} texts, none of them empty",
            "stop",
        )
    return tuple(texts)
