"""What a reply has to look like, as a structural tag that sampling is held to.

A structural tag is xgrammar's description of a text, as JSON; vLLM, SGLang and the embedded
engine all take it. The rules of a request (``response_format``, ``tool_choice``) become one, in
the words of the format that the model writes its calls and thoughts in.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.engine.grammar import GrammarError, check_structural_tag, require_xgrammar
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.tracking.model_request import ModelRequest, ReplyRules, RequestError
from agentrl_cli.tracking.parsers.formats import ReasoningFormat, ReplyFormats, ToolCallFormat
from agentrl_cli.tracking.parsers.syntax import CallSyntax
from agentrl_cli.tracking.parsers.table import TOOL_CALL_FORMATS
from agentrl_cli.tracking.schema_lengths import write_lengths
from agentrl_cli.tracking.schemas import SchemaError, check_schema

#: A part of a structural tag.
Format = dict[str, Any]

#: Longest run of white space inside of JSON. Without a limit some models write nothing else;
#: this many indent eight levels by four.
_MAX_WHITESPACE = 33
#: After a thought, as every known template has it.
_AFTER_THOUGHT = "\\n{0,2}"
#: Names that no format has to quote.
_PLAIN_NAME = re.compile(r"[\w.:/-]+")
#: What a call begins with before anything that may be written in several ways.
_TRIGGER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_ANY_OBJECT = {"type": "object"}


#: Tags that were found to be good; a run has a few.
_KNOWN: dict[str, None] = {}
_MAX_KNOWN = 4096
#: A grammar that takes longer would hold up an engine as well.
_CHECK_SECONDS = 20.0


async def constrain(request: ModelRequest, formats: ReplyFormats, prompt_end: str) -> Sampling:
    """The request's sampling, held to the request's rules.

    Args:
        request: checked, but for its rules.
        formats: how the model writes.
        prompt_end: the last part of the prompt's text, special tokens included.

    Raises:
        RequestError: see :func:`build_structural_tag`; or no grammar can be made of the rules, or
            xgrammar is not installed.
    """
    rules, tools = request.rules, request.inputs.tools
    tool_format = formats.tool_calls
    if not rules.parallel_tool_calls and tool_format is not None and not tool_format.end_of_call:
        # No text ends a call, so the grammar has to.
        rules = _name_tools(rules, tools, tool_format)
    tag = build_structural_tag(rules, tools, formats, prompt_end=prompt_end)
    if tag is not None:
        await _check_tag(tag, "tool_choice" if rules.response_format is None else "response_format")
        return replace(request.sampling, structural_tag=tag)
    end_of_call = tool_format.end_of_call if tool_format is not None else None
    if rules.parallel_tool_calls or not tools or not end_of_call:
        return request.sampling
    # One call a turn: sampling ends where the first one does, so that the message says all that
    # was sampled.
    return replace(request.sampling, stop=(*request.sampling.stop, end_of_call))


def _name_tools(
    rules: ReplyRules, tools: Sequence[dict[str, Any]], tool_format: ToolCallFormat
) -> ReplyRules:
    """The same rules, naming every tool, which is what makes a grammar of them."""
    if not tools or rules.callable_tools is not None:
        return rules
    if tool_format.syntax is None:
        raise RequestError(
            f"one call a turn cannot be asked of calls as {tool_format.name!r} reads them "
            "(engine.tool_call_parser): nothing ends a call. Leave parallel_tool_calls out",
            "parallel_tool_calls",
        )
    return replace(rules, callable_tools=tuple(tool["function"]["name"] for tool in tools))


async def _check_tag(tag: str, param: str) -> None:
    if tag in _KNOWN:
        return
    try:
        # Its import alone takes seconds, on a busy machine more than the check may.
        await asyncio.to_thread(require_xgrammar)
        async with asyncio.timeout(_CHECK_SECONDS):
            await asyncio.to_thread(check_structural_tag, tag)
    except TimeoutError:
        raise RequestError(
            f"{param}: no grammar was made of its schemas within {_CHECK_SECONDS:g} s: they, or "
            "patterns in them, are too large",
            param,
        ) from None
    except (GrammarError, MissingExtraError) as error:
        raise RequestError(f"{param}: {error}", param) from None
    if len(_KNOWN) >= _MAX_KNOWN:
        _KNOWN.clear()
    _KNOWN[tag] = None


def build_structural_tag(
    rules: ReplyRules,
    tools: Sequence[dict[str, Any]],
    formats: ReplyFormats,
    *,
    prompt_end: str = "",
) -> str | None:
    """The structural tag that ``rules`` ask for, as JSON; None: the reply is free.

    A required reply begins with its call, or its JSON, save that a model which thinks may think
    first. Beside tools, a ``response_format`` leaves the choice: calls, or an answer in it.

    Args:
        rules: what the request asks for.
        tools: the request's, as chat completions write them.
        formats: how the model writes.
        prompt_end: the last part of the prompt's text, which may open a thought.

    Raises:
        RequestError: a schema that sampling cannot be held to, a tool that is not there, or a
            format of calls that cannot be held to.
    """
    tools = _select_tools(rules, tools)
    answer = _build_answer(rules)
    if answer is not None and formats.tool_calls is not None and formats.tool_calls.reads_thoughts:
        raise RequestError(
            "a response_format cannot be asked of a model that writes its replies as "
            f"{formats.tool_calls.name!r} reads them (engine.tool_call_parser). Type "
            "response_format={'type': 'text'}",
            "response_format",
        )
    if rules.tool_choice == "required":
        content = _build_calls(rules, tools, formats.tool_calls)
    elif answer is not None and tools:
        content = _either(_build_calls(rules, tools, formats.tool_calls), answer)
    elif answer is not None:
        content = answer
    elif rules.callable_tools is not None and tools:
        content = _build_free_calls(rules, tools, formats.tool_calls)
    else:
        return None
    if formats.reasoning is not None:
        content = _after_thought(content, formats.reasoning, prompt_end)
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False)


def _select_tools(rules: ReplyRules, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [tool["function"]["name"] for tool in tools]
    wanted = names if rules.callable_tools is None else rules.callable_tools
    for name in wanted:
        if name not in names:
            there = ", ".join(names) or "none are offered"
            raise RequestError(f"tool_choice names {name!r}; tools: {there}", "tool_choice")
    if rules.tool_choice == "required" and not wanted:
        raise RequestError("tool_choice asks for a call, and no tools are offered", "tool_choice")
    return [tool for tool, name in zip(tools, names, strict=True) if name in wanted]


def _build_answer(rules: ReplyRules) -> Format | None:
    response_format = rules.response_format
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _format_json(_ANY_OBJECT)
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type {kind!r} is not known; allowed: text, json_object, json_schema",
            "response_format",
        )
    where = "response_format.json_schema"
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or "schema" not in described:
        raise RequestError(f"{where} must be an object with a 'schema'", where)
    try:
        check_schema(described["schema"])
    except SchemaError as error:
        raise RequestError(f"{where}.schema {error}", f"{where}.schema") from None
    return _format_json(described["schema"])


def _format_json(schema: Any, style: str = "json") -> Format:
    return {
        "type": "json_schema",
        "json_schema": write_lengths(schema),
        "style": style,
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }


def _build_calls(
    rules: ReplyRules, tools: Iterable[dict[str, Any]], tool_format: ToolCallFormat | None
) -> Format:
    """One call, or several, and nothing else."""
    syntax = _find_syntax(tool_format)
    calls = _list_calls(rules, tools, syntax)
    return _join(_text(syntax.section_begin), calls, _text(syntax.section_end))


def _list_calls(rules: ReplyRules, tools: Iterable[dict[str, Any]], syntax: CallSyntax) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": [_build_call(tool, syntax) for tool in tools],
        "separator": syntax.separator,
        "at_least_one": True,
        "stop_after_first": not rules.parallel_tool_calls,
    }


def _build_free_calls(
    rules: ReplyRules, tools: Sequence[dict[str, Any]], tool_format: ToolCallFormat | None
) -> Format:
    """Any text, in which calls are of these tools alone."""
    syntax = _find_syntax(tool_format)
    begin = syntax.section_begin or syntax.before_name
    if syntax.section_begin:
        content = _list_calls(rules, tools, syntax)
        tags = [{"type": "tag", "begin": begin, "content": content, "end": syntax.section_end}]
    else:
        tags = [_build_call(tool, syntax) for tool in tools]
    marker = _TRIGGER.match(begin)
    return {
        "type": "triggered_tags",
        "triggers": [marker[0] if marker else begin],
        "tags": tags,
        "stop_after_first": not rules.parallel_tool_calls,
    }


def _find_syntax(tool_format: ToolCallFormat | None) -> CallSyntax:
    if tool_format is None:
        raise RequestError(
            "a call is asked for, but the engine reads no calls: set engine.tool_call_parser",
            "tool_choice",
        )
    if tool_format.syntax is None or tool_format.reads_thoughts:
        able = [
            one.name
            for one in TOOL_CALL_FORMATS.values()
            if one.syntax is not None and not one.reads_thoughts
        ]
        raise RequestError(
            f"sampling cannot be held to calls as {tool_format.name!r} reads them "
            f"(engine.tool_call_parser); it can with {', '.join(able)}. Type tool_choice='auto', "
            "and no response_format beside tools",
            "tool_choice",
        )
    return tool_format.syntax


def _build_call(tool: dict[str, Any], syntax: CallSyntax) -> Format:
    function = tool["function"]
    name = function["name"]
    if not _PLAIN_NAME.fullmatch(name):
        raise RequestError(
            f"the tool name {name!r:.60} cannot be asked for: letters, digits, '_' and '-' only",
            "tools",
        )
    arguments = _format_json(_find_parameters(function), syntax.arguments_style)
    if not syntax.after_name_pattern:
        return {
            "type": "tag",
            "begin": syntax.begin(name),
            "content": arguments,
            "end": syntax.end,
        }
    between = {"type": "regex", "pattern": syntax.after_name_pattern}
    content = _join(between, _text(syntax.before_arguments), arguments)
    return {"type": "tag", "begin": syntax.begin(name), "content": content, "end": syntax.end}


def _find_parameters(function: dict[str, Any]) -> Any:
    """The schema of a tool's arguments, or any object where it promises too much.

    Only a tool that is ``strict`` has to be held to all that its schema says.
    """
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return _ANY_OBJECT
    where = f"tools: {function['name']!r}: parameters"
    try:
        check_schema(parameters)
    except SchemaError as error:
        if error.is_unsupported and not function.get("strict"):
            return _ANY_OBJECT
        raise RequestError(f"{where} {error}", "tools") from None
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where} must be of type 'object', found {parameters['type']!r}", "tools"
        )
    return parameters


def _after_thought(content: Format, reasoning: ReasoningFormat, prompt_end: str) -> Format:
    is_inside = reasoning.is_inside(prompt_end)
    thought: Format = {
        "type": "tag",
        "begin": "" if is_inside else reasoning.syntax.begin,
        "content": {"type": "any_text"},
        "end": reasoning.syntax.end,
    }
    thought = _join(thought, {"type": "regex", "pattern": _AFTER_THOUGHT})
    return _join(thought if is_inside else {"type": "optional", "content": thought}, content)


def _either(*formats: Format) -> Format:
    return {"type": "or", "elements": list(formats)}


def _join(*formats: Format) -> Format:
    filled = [one for one in formats if one.get("value") != ""]
    return filled[0] if len(filled) == 1 else {"type": "sequence", "elements": filled}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
