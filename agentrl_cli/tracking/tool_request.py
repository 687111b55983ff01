"""What OpenAI's two APIs say of tools: which there are, and whether one has to be called.

Both become chat completions' form of a tool, and :class:`ReplyRules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl_cli.errors import format_nearest
from agentrl_cli.tracking.model_request import ReplyRules, RequestError
from agentrl_cli.tracking.request_fields import check_keys, drop_nulls, take

Tool = dict[str, Any]

#: OpenAI's rule for names of tools; a name ends up in a grammar and in the model's own text.
_NAME = re.compile(r"[a-zA-Z0-9_.:\-]{1,128}")
_MAX_TOOLS = 1024
_FLAT_KEYS = ("name", "description", "parameters", "strict")
#: Keys of a response's tool that are about code which calls tools, or tools that come later.
_NEUTRAL_FLAT_KEYS = frozenset({"type", "output_schema"})
_UNUSED_FLAT_VALUES: Mapping[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
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
                f"tool_choice is {choice!r:.80}, but no tools are given; pass tools", "tool_choice"
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
