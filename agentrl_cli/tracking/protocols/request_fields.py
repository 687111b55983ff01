"""What the protocols share: reading a JSON body, its sampling fields and its tools.

Every refusal names the field and says what is allowed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import format_nearest
from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.protocols.model_request import ReplyRules, RequestError
from agentrl_cli.tracking.session import Session
from agentrl_cli.tracking.template import TemplateInputs, make_template_inputs

#: Half of a surrogate pair, escaped.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS: Mapping[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "an object"}
#: Keys of both of OpenAI's APIs that change nothing about what is sampled: bookkeeping, routing
#: and caching hints.
NEUTRAL_KEYS = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
#: What OpenAI allows; engines compute no more beside each token.
MAX_TOP_LOGPROBS = 20
#: How long replies shall be: the OpenAI Agents SDK sends it unasked, and nothing honours it.
VERBOSITIES = frozenset({"low", "medium", "high"})
#: How much to reason, as OpenAI names it.
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
#: What the gateway itself passes to the tokenizer, or would change what comes back from it.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
Tool = dict[str, Any]
#: OpenAI's rule for names of tools; a name ends up in a grammar and in the model's own text.
_NAME = re.compile(r"[a-zA-Z0-9_.:\-]{1,128}")
_MAX_TOOLS = 1024
_MAX_STOPS = 64
_FLAT_KEYS = ("name", "description", "parameters", "strict")
#: Keys of a response's tool that are about code which calls tools, or tools that come later.
_NEUTRAL_FLAT_KEYS = frozenset({"type", "output_schema"})
_UNUSED_FLAT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}


def parse_json(data: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        RequestError: it is not JSON, not an object, or has text that is not valid Unicode.
    """
    try:
        value = json.loads(data, parse_constant=_refuse_constant, parse_float=_parse_number)
    except RecursionError:
        raise RequestError("the body is nested too deep") from None
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    if _SURROGATE.search(data):
        _check_unicode(value)
    return value


def _check_unicode(value: dict[str, Any]) -> None:
    """Refuses lone surrogates: JSON can escape them, but nothing can tokenize or store them."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the body has text that is not valid Unicode: {error.reason}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        # Written again it would be Infinity, which JSON does not know.
        raise ValueError(f"the number {text:.20} is too large")
    return number


def drop_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the keys that are null: a null means "not given" everywhere."""
    return {key: value for key, value in body.items() if value is not None}


def check_keys(
    body: Mapping[str, Any],
    honoured: Collection[str],
    neutral: Collection[str],
    unused: Mapping[str, tuple[Any, ...]],
    path: str = "",
) -> None:
    """Refuses keys that would be dropped in silence.

    Args:
        body: without nulls.
        honoured: keys that are read.
        neutral: keys that change nothing about what is sampled.
        unused: keys that are allowed only at a value that means "not used".
        path: where ``body`` stands in the request, ending in a point.

    Raises:
        RequestError: naming the key, with the nearest known one.
    """
    for key, value in body.items():
        if key in honoured or key in neutral:
            continue
        if key not in unused:
            raise RequestError(
                f"{path + key!r:.80} is not supported here; {format_nearest(key, honoured)}",
                (path + key)[:80],
            )
        if value not in unused[key]:
            raise RequestError(
                f"{path}{key} = {value!r:.80} is not supported here; leave it out", f"{path}{key}"
            )


def take(body: Mapping[str, Any], key: str, kind: type, default: Any, path: str = "") -> Any:
    """The value of ``key`` if it is of type ``kind``.

    Args:
        body: the object that holds it.
        key: its name there.
        kind: bool, str, list or dict.
        default: where the key is missing or null.
        path: where ``body`` stands in the request, ending in a point.

    Raises:
        RequestError: it is of another type.
    """
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise RequestError(
            f"{path}{key} must be {_KINDS[kind]}, found {value!r:.80}", f"{path}{key}"
        )
    return value


def take_choice(
    body: Mapping[str, Any], key: str, allowed: Collection[str], path: str = ""
) -> str | None:
    """The text of ``key`` if it is one of ``allowed``; None where it is missing.

    Raises:
        RequestError: it is anything else.
    """
    value = body.get(key)
    if value is None or (isinstance(value, str) and value in allowed):
        return value
    raise RequestError(
        f"{path}{key} is {value!r:.80}; allowed: {', '.join(sorted(allowed))}", f"{path}{key}"
    )


def take_int(
    body: Mapping[str, Any], key: str, default: int, *, minimum: int, maximum: int = 2**63
) -> int:
    """The whole number of ``key``.

    Raises:
        RequestError: it is not a whole number, or out of range.
    """
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        upper = f" to {maximum}" if maximum < 2**63 else " or more"
        raise RequestError(
            f"{key} must be a whole number, {minimum}{upper}; found {value!r:.80}", key
        )
    return value


def take_number(
    body: Mapping[str, Any], key: str, default: float, minimum: float, maximum: float
) -> float:
    """The number of ``key``.

    Raises:
        RequestError: it is not a number, or out of range.
    """
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{key} must be a number, found {value!r:.80}", key)
    if not minimum <= value <= maximum:
        raise RequestError(
            f"{key} must be from {minimum:g} to {maximum:g}, found {value!r:.80}", key
        )
    return float(value)


def parse_stops(texts: Any, key: str) -> tuple[str, ...]:
    """The texts that end the reply, as the list under ``key`` gives them.

    Raises:
        RequestError: too many, or not all of them are text.
    """
    if (
        not isinstance(texts, list)
        or len(texts) > _MAX_STOPS
        or not all(isinstance(t, str) and t for t in texts)
    ):
        raise RequestError(
            f"{key} must be a list of at most {_MAX_STOPS} texts, none of them empty", key
        )
    return tuple(texts)


def find_completed(session: Session, interaction_id: str) -> Interaction | None:
    """The session's completed interaction of that id."""
    for interaction in session.interactions:
        if interaction.id == interaction_id:
            return interaction if interaction.status is InteractionStatus.COMPLETED else None
    return None


def parse_sampling(
    body: Mapping[str, Any],
    defaults: Sampling,
    *,
    limits: tuple[str, ...],
    stop: tuple[str, ...] = (),
    num_top_logprobs: int = 0,
) -> Sampling:
    """How to sample; ``defaults`` hold where the body says nothing, and limit its length.

    Args:
        body: of the request.
        defaults: the session's.
        limits: the names of the keys that limit the length.
        stop: texts that end the reply.
        num_top_logprobs: how many tokens are reported beside each sampled one.

    Raises:
        RequestError: naming the key that is wrong.
    """
    limit = defaults.max_tokens
    for key in limits:
        if key in body:
            asked = take_int(body, key, 1, minimum=1)
            limit = asked if limit is None else min(asked, limit)
    seed = None
    if "seed" in body:
        seed = take_int(body, "seed", 0, minimum=-(2**63), maximum=2**63 - 1)
    return replace(
        defaults,
        max_tokens=limit,
        temperature=take_number(body, "temperature", defaults.temperature, 0.0, 10.0),
        # 0 asks for the one most probable token.
        top_p=take_number(body, "top_p", defaults.top_p, 0.0, 1.0) or 1e-6,
        stop=(*defaults.stop, *stop),
        # The session's gives each of its calls another one.
        seed=seed,
        num_top_logprobs=num_top_logprobs,
    )


def parse_template_inputs(
    body: Mapping[str, Any], tools: tuple[Tool, ...], effort: str | None
) -> TemplateInputs:
    """What the chat template gets besides the messages.

    The effort of reasoning is the template's affair: it gets ``reasoning_effort``, and with
    ``none`` ``enable_thinking=False``, which templates that know neither ignore. What
    ``chat_template_kwargs`` say comes first.

    Raises:
        RequestError: a keyword that is not the template's.
    """
    asked = take(body, "chat_template_kwargs", dict, {})
    for key in asked:
        if key in _RESERVED_TEMPLATE_KWARGS:
            raise RequestError(
                f"chat_template_kwargs.{key} is not the template's; pass only what the model's "
                "chat template reads, such as enable_thinking",
                "chat_template_kwargs",
            )
    kwargs: dict[str, Any] = {}
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        if effort == "none":
            kwargs["enable_thinking"] = False
    return make_template_inputs(tools, kwargs | asked)


def parse_format(
    format_body: Mapping[str, Any], schema_body: Mapping[str, Any], where: str
) -> dict[str, Any] | None:
    """A wanted form of the reply as chat completions write it; None: any text.

    Args:
        format_body: the object with the ``type``.
        schema_body: the object with ``name``, ``schema`` and ``strict``.
        where: the key of the request that holds it.

    Raises:
        RequestError: an unknown type, or no valid schema.
    """
    kind = format_body.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise RequestError(
            f"{where}.type {kind!r:.80} is not known; allowed: text, json_object, json_schema",
            where,
        )
    name = take(schema_body, "name", str, "", f"{where}.")
    schema = schema_body.get("schema")
    if not name or not isinstance(schema, dict):
        raise RequestError(
            f"{where} of type json_schema needs a name and a schema that is an object", where
        )
    strict = take(schema_body, "strict", bool, False, f"{where}.")
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": schema, "strict": strict},
    }


def parse_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The checked tools of a chat completion's body.

    Raises:
        RequestError: naming the tool that is wrong.
    """
    tools = _take_tools(body)
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise _refuse_tool(index, "{'type': 'function', 'function': {'name': ...}}")
        _check_function(function, f"tools[{index}].function")
    _check_names(tools)
    return tuple(tools)


def parse_flat_tools(body: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The checked tools of a response's body, in chat completions' form.

    Raises:
        RequestError: naming the tool that is wrong.
    """
    tools: list[Tool] = []
    for index, tool in enumerate(_take_tools(body)):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _refuse_tool(index, "{'type': 'function', 'name': ..., 'parameters': ...}")
        tool = drop_nulls(tool)
        _check_function(tool, f"tools[{index}]")
        where = f"tools[{index}]."
        check_keys(tool, _FLAT_KEYS, _NEUTRAL_FLAT_KEYS, _UNUSED_FLAT_VALUES, path=where)
        function = {key: tool[key] for key in _FLAT_KEYS if key in tool}
        tools.append({"type": "function", "function": function})
    _check_names(tools)
    return tuple(tools)


def parse_tool_rules(
    body: Mapping[str, Any], tools: Sequence[Tool], response_format: Mapping[str, Any] | None
) -> tuple[ReplyRules, bool]:
    """What ``tool_choice`` and ``parallel_tool_calls`` ask for, and whether calls are read.

    Calls are not read where no tools were offered, or with ``"none"``: text that looks like
    a call is text then. The tools stay in the prompt, so that the conversation's tokens go on.

    Raises:
        RequestError: an unknown choice, or a tool that was not offered.
    """
    choice = body.get("tool_choice")
    parallel = take(body, "parallel_tool_calls", bool, True)
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError(
                "tool_choice asks for a call, but no tools are given; pass tools", "tool_choice"
            )
        return ReplyRules(response_format=response_format), False
    mode, names = _parse_choice(choice)
    known = [tool["function"]["name"] for tool in tools]
    for name in names or ():
        if name not in known:
            raise RequestError(
                f"tool_choice names the tool {name!r:.80}; {format_nearest(name, known)}",
                "tool_choice",
            )
    if mode == "none":
        return ReplyRules(response_format=response_format, callable_tools=()), False
    rules = ReplyRules(
        response_format=response_format,
        tool_choice="required" if mode == "required" else "auto",
        callable_tools=names,
        parallel_tool_calls=parallel,
    )
    return rules, True


def _parse_choice(choice: Any) -> tuple[str, tuple[str, ...] | None]:
    """``auto``, ``none`` or ``required``, and the names of the tools that may be called."""
    if choice is None or choice in ("auto", "none", "required"):
        return choice or "auto", None
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _find_name(choice)
        if name is not None:
            return "required", (name,)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if isinstance(allowed, dict) and allowed.get("mode") in ("auto", "required"):
            tools = allowed.get("tools")
            names = [_find_name(tool) for tool in tools] if isinstance(tools, list) else []
            if names and None not in names:
                return allowed["mode"], tuple(name for name in names if name is not None)
    raise RequestError(
        f"tool_choice is {choice!r:.80}; allowed: 'auto', 'none', 'required', one function "
        "({'type': 'function', ...} with its name) and 'allowed_tools' with functions; built-in "
        "tools do not run here",
        "tool_choice",
    )


def _find_name(tool: Any) -> str | None:
    """The name of a function in either API's form; None: it names none."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _take_tools(body: Mapping[str, Any]) -> list[Any]:
    tools: list[Any] = take(body, "tools", list, [])
    if len(tools) > _MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries; at most {_MAX_TOOLS}", "tools")
    return tools


def _refuse_tool(index: int, allowed: str) -> RequestError:
    return RequestError(
        f"tools[{index}] must be {allowed}; built-in tools of other providers do not run here",
        f"tools[{index}]",
    )


def _check_function(function: Mapping[str, Any], where: str) -> None:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.name is {name!r:.80}; it must be 1 to 128 letters, digits, or _ . : -",
            f"{where}.name",
        )
    take(function, "description", str, "", f"{where}.")
    take(function, "parameters", dict, {}, f"{where}.")
    take(function, "strict", bool, False, f"{where}.")


def _check_names(tools: Sequence[Tool]) -> None:
    """Two tools of one name could not be told apart in a call."""
    names = [tool["function"]["name"] for tool in tools]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RequestError(f"tools has two functions named {doubled!r}", "tools")
