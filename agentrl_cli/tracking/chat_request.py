"""``/v1/chat/completions``, the way in: a JSON body to a checked request.

What cannot be honoured is refused, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Message
from agentrl_cli.tracking.model_request import ModelRequest, RequestError
from agentrl_cli.tracking.template import make_template_inputs

#: Keys that change nothing about what is sampled: bookkeeping, routing and caching hints.
_NEUTRAL_KEYS = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
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
        "response_format",
        "chat_template_kwargs",
    }
)
#: Keys that are accepted only at the value that means "not used".
_UNUSED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "functions": ([],),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def parse_chat_request(body: dict[str, Any], defaults: Sampling) -> ModelRequest:
    """The request in a JSON body; ``defaults`` hold where the body says nothing.

    Raises:
        RequestError: naming the key, what was found and what is allowed.
    """
    body = {k: v for k, v in body.items() if v is not None}
    _check_keys(body)
    tools = parse_tools(body)
    tool_choice = body.get("tool_choice", "auto")
    if tool_choice not in ("auto", "none"):
        raise RequestError(
            f"tool_choice {tool_choice!r} needs constrained sampling, which this engine does not "
            "have; allowed: 'auto', 'none'",
            "tool_choice",
        )
    if tool_choice == "none":
        tools = ()
    stop = _parse_stop(body)
    if not _take(body, "parallel_tool_calls", bool, True) and tools:
        # One call a turn: sampling ends where the first call does, so that the message
        # says all that was sampled.
        stop = (*stop, "</tool_call>")
    stream_options = _take(body, "stream_options", dict, {})
    return ModelRequest(
        messages=parse_messages(body),
        inputs=make_template_inputs(tools, _take(body, "chat_template_kwargs", dict, {})),
        sampling=_parse_sampling(body, defaults, stop),
        num_choices=_take_int(body, "n", 1, minimum=1, maximum=128),
        stream=_take(body, "stream", bool, False),
        include_usage=bool(stream_options.get("include_usage")),
        logprobs=_take(body, "logprobs", bool, False),
        parse_tools=bool(tools),
    )


def _check_keys(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if key in _HONOURED_KEYS or key in _NEUTRAL_KEYS:
            continue
        unused = _UNUSED_VALUES.get(key)
        if unused is None:
            raise RequestError(
                f"{key!r} is not supported here; {format_nearest(key, _HONOURED_KEYS)}", key
            )
        if value not in unused:
            raise RequestError(f"{key} = {value!r} is not supported here; leave it out", key)
    kind = _take(body, "response_format", dict, {"type": "text"}).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise RequestError(
            f"response_format.type {kind!r} is not known; allowed: text, json_object, json_schema",
            "response_format",
        )


def parse_messages(body: dict[str, Any]) -> tuple[Message, ...]:
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
                f"{where}.role is {message.get('role')!r}; allowed: {', '.join(_ROLES)}",
                f"{where}.role",
            )
        _check_content(message.get("content"), where)
        _check_tool_calls(message.get("tool_calls"), where)
    return tuple(messages)


def _check_content(content: Any, where: str) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be text or a list of parts", f"{where}.content")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}.content has a part of type {kind!r}; this engine reads text parts only",
                f"{where}.content",
            )


def _check_tool_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list", f"{where}.tool_calls")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{where}.tool_calls must hold {{'id', 'type', 'function': {{'name', "
                "'arguments'}} objects",
                f"{where}.tool_calls",
            )


def parse_tools(body: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """The checked tools of a request body.

    Raises:
        RequestError: naming the tool that is wrong.
    """
    tools = _take(body, "tools", list, [])
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise RequestError(
                f"tools[{index}] must be {{'type': 'function', 'function': {{'name': ...}}}}; "
                "built-in tools of other providers do not run here",
                f"tools[{index}]",
            )
    return tuple(tools)


def _parse_stop(body: dict[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise RequestError("stop must be a text or a list of texts, none of them empty", "stop")
    return tuple(texts)


def _parse_sampling(body: dict[str, Any], defaults: Sampling, stop: tuple[str, ...]) -> Sampling:
    limit = defaults.max_tokens
    for key in ("max_tokens", "max_completion_tokens"):
        if key in body:
            asked = _take_int(body, key, 1, minimum=1)
            limit = asked if limit is None else min(asked, limit)
    seed = _take_int(body, "seed", 0, minimum=-(2**63)) if "seed" in body else defaults.seed
    return replace(
        defaults,
        max_tokens=limit,
        temperature=_take_number(body, "temperature", defaults.temperature, 0.0, 10.0),
        top_p=_take_number(body, "top_p", defaults.top_p, 0.0, 1.0) or 1e-6,
        stop=(*defaults.stop, *stop),
        seed=seed,
    )


def _take(body: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = body.get(key, default)
    if not isinstance(value, kind):
        raise RequestError(f"{key} must be of type {kind.__name__}, found {value!r:.80}", key)
    return value


def _take_int(
    body: dict[str, Any], key: str, default: int, *, minimum: int, maximum: int = 2**63
) -> int:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        upper = f" to {maximum}" if maximum < 2**63 else " or more"
        raise RequestError(
            f"{key} must be a whole number, {minimum}{upper}; found {value!r:.80}", key
        )
    return value


def _take_number(
    body: dict[str, Any], key: str, default: float, minimum: float, maximum: float
) -> float:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{key} must be a number, found {value!r:.80}", key)
    if not minimum <= value <= maximum:
        raise RequestError(f"{key} must be from {minimum:g} to {maximum:g}, found {value!r}", key)
    return float(value)
