"""What a reply has to look like, as a structural tag that constrains the sampling.

A structural tag is xgrammar's description of a text, as JSON; vLLM, SGLang and the embedded engine
all accept it. The rules of a request (``response_format``, ``tool_choice``) become one, in the
format in which the model writes its calls and reasoning. xgrammar describes the calls of the
formats that it knows, and ``CallSyntax`` those of the others.

Of a JSON schema, xgrammar 0.2.8 silently ignores what it cannot express. What it never expresses
is refused; whether a reply validates in the end is for jsonschema to judge.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_cli.engine.grammar import (
    GrammarError,
    check_structural_tag,
    require_jsonschema,
    require_xgrammar,
)
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Message
from agentrl_cli.tracking.formats.format_table import TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import (
    CallSyntax,
    ReasoningFormat,
    ReplyFormats,
    ToolCallFormat,
)
from agentrl_cli.tracking.protocols.model_request import ModelRequest, ReplyRules, RequestError

#: A part of a structural tag.
Format = dict[str, Any]

_log = get_logger(__name__)
#: Longest run of white space inside of JSON. Without a limit some models write nothing else;
#: this many indent eight levels by four.
_MAX_WHITESPACE = 33
#: After reasoning, as every known template has it.
_AFTER_REASONING = "\\n{0,2}"
#: Names that no format has to quote.
_PLAIN_NAME = re.compile(r"[\w.:/-]+")
#: What a call begins with before anything that may be written in several ways.
_TRIGGER = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
_ANY_OBJECT = {"type": "object"}
#: A grammar that takes longer would hold up an engine as well.
_CHECK_SECONDS = 20.0

#: Levels of objects and lists in a schema: the same as vLLM's.
MAX_NESTING = 64
#: xgrammar's masks for a pattern that repeats a part more often allow tokens that it then refuses.
_MAX_REPEATS = 128
_REPEATS = re.compile(r"\{(\d*),?(\d*)\}")
#: One character of a string with bounds, which are written as a pattern: into a string with
#: ``minLength`` or ``maxLength`` xgrammar lets control characters through. Not those that JSON
#: writes with a backslash (as an alternative they make a mask ten times as slow), and not the
#: halves of surrogate pairs, whose bytes a decoder takes for three characters each.
_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"
#: What xgrammar ignores wherever it stands.
_IGNORED = (
    *("not", "if", "contains", "dependentRequired", "dependentSchemas", "$dynamicRef"),
    *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
)
#: Of these it reads one, and none of those beside it.
_CHOICES = ("$ref", "anyOf", "oneOf", "allOf")
_IGNORED_BESIDE_CHOICES = ("type", "properties", "required", "const", "enum")
#: Where a schema holds further schemas: directly, in lists, and by name.
_PARTS = ("items", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


class SchemaError(Exception):
    """A schema that sampling cannot be constrained to.

    Attributes:
        is_unsupported: True: the schema is sound, but says more than a grammar can.
    """

    def __init__(self, at: str, problem: str, *, is_unsupported: bool = False) -> None:
        super().__init__(f"at {at}: {problem}")
        self.is_unsupported = is_unsupported


async def constrain(request: ModelRequest, formats: ReplyFormats, prompt_end: str) -> Sampling:
    """The request's sampling, constrained by the request's rules.

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
    end_of_call = tool_format.end_of_call if tool_format is not None else None
    must_end = not rules.parallel_tool_calls and tool_format is not None and not end_of_call
    if must_end and tools and rules.callable_tools is None:
        # No text ends a call, so the grammar has to: naming the tools makes one.
        names = tuple(tool["function"]["name"] for tool in tools)
        rules = replace(rules, callable_tools=names)
    if rules.tool_choice == "required" or rules.callable_tools or rules.response_format:
        tag = await _build_checked_tag(rules, tools, formats, prompt_end)
        if tag is not None:
            return replace(request.sampling, structural_tag=tag)
    if rules.parallel_tool_calls or not tools or not end_of_call:
        return request.sampling
    # One call a turn: sampling ends where the first one does, so that the message says all that
    # was sampled.
    return replace(request.sampling, stop=(*request.sampling.stop, end_of_call))


async def _build_checked_tag(
    rules: ReplyRules, tools: Sequence[dict[str, Any]], formats: ReplyFormats, prompt_end: str
) -> str | None:
    def build() -> str | None:
        tag = build_structural_tag(rules, tools, formats, prompt_end=prompt_end)
        if tag is not None:
            _check_tag(tag)
        return tag

    param = "tool_choice" if rules.response_format is None else "response_format"
    try:
        # Its import alone takes seconds.
        await asyncio.to_thread(require_xgrammar)
        async with asyncio.timeout(_CHECK_SECONDS):
            return await asyncio.to_thread(build)
    except (GrammarError, MissingExtraError) as error:
        raise RequestError(f"{param}: {error}", param) from None
    except TimeoutError:
        raise RequestError(
            f"{param}: no grammar was made of its schemas within {_CHECK_SECONDS:g} s: they, or "
            "patterns in them, are too large",
            param,
        ) from None


#: A run has a few tags.
_check_tag = functools.lru_cache(maxsize=4096)(check_structural_tag)


def build_structural_tag(
    rules: ReplyRules,
    tools: Sequence[dict[str, Any]],
    formats: ReplyFormats,
    *,
    prompt_end: str = "",
) -> str | None:
    """The structural tag that ``rules`` ask for, as JSON; None: the reply is free.

    A required reply begins with its call, or its JSON, save that a model with reasoning may reason
    first. Beside tools, a ``response_format`` leaves the choice: calls, or an answer in it.

    Args:
        rules: what the request asks for.
        tools: the request's, as chat completions write them.
        formats: how the model writes.
        prompt_end: the last part of the prompt's text, which may begin the reasoning.

    Raises:
        RequestError: a schema or a format of calls that sampling cannot be constrained to, or a
            tool that is not offered.
        MissingExtraError: xgrammar or jsonschema is not installed.
    """
    tools = _select_tools(rules, tools)
    answer = _build_answer(rules.response_format)
    if answer is not None and formats.tool_calls is not None and formats.tool_calls.reads_reasoning:
        raise RequestError(
            "a response_format cannot be asked of a model that writes its replies in the format "
            f"{formats.tool_calls.name!r} (engine.tool_call_parser). Type "
            "response_format={'type': 'text'}",
            "response_format",
        )
    if rules.tool_choice == "required":
        content = _build_calls(rules, tools, formats.tool_calls)
    elif answer is not None and tools:
        calls = _build_calls(rules, tools, formats.tool_calls)
        content = {"type": "or", "elements": [calls, answer]}
    elif answer is not None:
        content = answer
    elif rules.callable_tools is not None and tools:
        content = _build_free_calls(rules, tools, formats.tool_calls)
    else:
        return None
    if formats.reasoning is not None:
        content = _after_reasoning(content, formats.reasoning, prompt_end)
    return json.dumps({"type": "structural_tag", "format": content}, ensure_ascii=False)


def _select_tools(rules: ReplyRules, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [tool["function"]["name"] for tool in tools]
    wanted = names if rules.callable_tools is None else rules.callable_tools
    for name in wanted:
        if name not in names:
            offered = ", ".join(names) or "none are offered"
            raise RequestError(f"tool_choice names {name!r}; tools: {offered}", "tool_choice")
    if rules.tool_choice == "required" and not wanted:
        raise RequestError("tool_choice asks for a call, and no tools are offered", "tool_choice")
    return [tool for tool, name in zip(tools, names, strict=True) if name in wanted]


def _build_answer(response_format: Mapping[str, Any] | None) -> Format | None:
    if response_format is None:
        return None
    if response_format["type"] == "json_object":
        return _format_json(_ANY_OBJECT)
    where = "response_format.json_schema.schema"
    try:
        return _format_json(prepare_schema(response_format["json_schema"]["schema"]))
    except SchemaError as error:
        raise RequestError(f"{where} {error}", where) from None


def _format_json(schema: Any, style: str = "json") -> Format:
    return {
        "type": "json_schema",
        "json_schema": schema,
        "style": style,
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }


def _build_calls(
    rules: ReplyRules, tools: Sequence[dict[str, Any]], tool_format: ToolCallFormat | None
) -> Format:
    """One call, or several, and nothing else."""
    grammar = _find_grammar(tool_format)
    if isinstance(grammar, CallSyntax):
        tags = [_build_call(tool, grammar) for tool in tools]
        calls = _list_calls(rules, tags, grammar.separator)
        return _join(_text(grammar.section_begin), calls, _text(grammar.section_end))
    calls = _ask_xgrammar(grammar, "required", rules, tools)
    if calls["type"] != "triggered_tags":
        return calls
    # xgrammar lets text stand before such calls, which a model may never stop writing.
    return _list_calls(rules, calls["tags"], "\n")


def _build_free_calls(
    rules: ReplyRules, tools: Sequence[dict[str, Any]], tool_format: ToolCallFormat | None
) -> Format:
    """Any text, in which calls are of these tools alone."""
    grammar = _find_grammar(tool_format)
    if not isinstance(grammar, CallSyntax):
        return _ask_xgrammar(grammar, "auto", rules, tools)
    begin = grammar.section_begin or grammar.before_name
    tags = [_build_call(tool, grammar) for tool in tools]
    if grammar.section_begin:
        content = _list_calls(rules, tags, grammar.separator)
        tags = [{"type": "tag", "begin": begin, "content": content, "end": grammar.section_end}]
    marker = _TRIGGER.match(begin)
    return {
        "type": "triggered_tags",
        "triggers": [marker[0] if marker else begin],
        "tags": tags,
        "stop_after_first": not rules.parallel_tool_calls,
    }


def _list_calls(rules: ReplyRules, calls: list[Format], separator: str) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not rules.parallel_tool_calls,
    }


def _ask_xgrammar(
    model: str, tool_choice: str, rules: ReplyRules, tools: Sequence[dict[str, Any]]
) -> Format:
    """Calls in the format of one of the models that xgrammar knows."""
    functions = [
        {"name": _read_name(tool), "parameters": _find_parameters(tool["function"])}
        for tool in tools
    ]
    tag = require_xgrammar().get_model_structural_tag(
        model,
        tools=[{"type": "function", "function": function} for function in functions],
        tool_choice=tool_choice,
        reasoning="disabled",
        exclude_special_tokens=False,
        max_whitespace_cnt=_MAX_WHITESPACE,
        parallel_tool_calls=rules.parallel_tool_calls,
    )
    content: Format = tag.format.model_dump()
    return content


def _find_grammar(tool_format: ToolCallFormat | None) -> CallSyntax | str:
    if tool_format is None:
        raise RequestError(
            "a call is asked for, but the engine reads no calls: set engine.tool_call_parser",
            "tool_choice",
        )
    if tool_format.grammar is None:
        able = [one.name for one in TOOL_CALL_FORMATS.values() if one.grammar is not None]
        raise RequestError(
            f"sampling cannot be constrained to calls in the format {tool_format.name!r} "
            f"(engine.tool_call_parser); it can with {', '.join(able)}. Type tool_choice='auto', "
            "without response_format and parallel_tool_calls=False beside tools",
            "tool_choice",
        )
    return tool_format.grammar


def _build_call(tool: dict[str, Any], syntax: CallSyntax) -> Format:
    arguments = _format_json(_find_parameters(tool["function"]), syntax.arguments_style)
    begin = syntax.before_name + _read_name(tool) + syntax.before_arguments
    return {"type": "tag", "begin": begin, "content": arguments, "end": syntax.end}


def _read_name(tool: dict[str, Any]) -> str:
    name: str = tool["function"]["name"]
    if not _PLAIN_NAME.fullmatch(name):
        raise RequestError(
            f"the tool name {name!r:.60} cannot be asked for: letters, digits, '_' and '-' only",
            "tools",
        )
    return name


def _find_parameters(function: dict[str, Any]) -> Any:
    """The schema of a tool's arguments, or any object where it promises too much.

    Only a tool that is ``strict`` has to be constrained to all that its schema says.
    """
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        return _ANY_OBJECT
    where = f"tools: {function['name']!r}: parameters"
    try:
        parameters = prepare_schema(parameters)
    except SchemaError as error:
        if error.is_unsupported and not function.get("strict"):
            return _ANY_OBJECT
        raise RequestError(f"{where} {error}", "tools") from None
    if parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where} must be of type 'object', found {parameters['type']!r}", "tools"
        )
    return parameters


def _after_reasoning(content: Format, reasoning: ReasoningFormat, prompt_end: str) -> Format:
    is_inside = reasoning.is_inside(prompt_end)
    text: Format = {
        "type": "tag",
        "begin": "" if is_inside else reasoning.begin,
        "content": {"type": "any_text"},
        "end": reasoning.end,
    }
    text = _join(text, {"type": "regex", "pattern": _AFTER_REASONING})
    return _join(text if is_inside else {"type": "optional", "content": text}, content)


def _join(*formats: Format) -> Format:
    filled = [one for one in formats if one.get("value") != ""]
    return filled[0] if len(filled) == 1 else {"type": "sequence", "elements": filled}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def prepare_schema(schema: Any) -> Any:
    """The schema as xgrammar gets it; lengths of strings are written as patterns.

    Raises:
        SchemaError: it is no JSON schema, or says what no grammar does; names the place in it.
        MissingExtraError: jsonschema is not installed.
    """
    if _count_levels(schema) > MAX_NESTING:
        raise SchemaError("#", f"objects and lists are nested deeper than {MAX_NESTING} levels")
    return _prepare(json.dumps(schema))


def _count_levels(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_count_levels, parts), default=0) if isinstance(value, dict | list) else 0


@functools.lru_cache(maxsize=1024)
def _prepare(text: str) -> Any:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise SchemaError("#", f"a schema is a JSON object, found {text:.60}")
    if "\\u0000" in text:
        # xgrammar has crashed on it.
        raise SchemaError("#", "a text in it holds a NUL character")
    jsonschema = require_jsonschema()
    try:
        # Patterns are xgrammar's to judge.
        jsonschema.Draft202012Validator.check_schema(schema, format_checker=None)
    except jsonschema.SchemaError as error:
        at = "/".join(["#", *map(str, error.absolute_path)])
        causes = [cause.message for cause in error.context or [error]]
        raise SchemaError(at, "; or ".join(causes)) from None
    _prepare_part(schema, "#")
    return schema


def _prepare_part(schema: Any, at: str) -> None:
    """Checks a schema and those in it, and writes bounds of length as patterns."""
    if isinstance(schema, bool):
        return
    for problem in _list_unsupported(schema):
        raise SchemaError(at, problem, is_unsupported=True)
    if isinstance(schema.get("propertyNames"), dict):
        schema["propertyNames"].setdefault("type", "string")
    missing = set(schema.get("required", ())).difference(schema.get("properties", ()))
    if missing and schema.get("type") == "object" and not schema.get("additionalProperties"):
        raise SchemaError(at, f"'required' names {min(missing)!r}, which 'properties' lacks")
    bounds = [schema[key] for key in ("minLength", "maxLength") if key in schema]
    if bounds and max(bounds) <= _MAX_REPEATS and not {"pattern", "format"}.intersection(schema):
        least, most = schema.pop("minLength", 0), schema.pop("maxLength", "")
        schema["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    parts = [(key, schema[key]) for key in _PARTS if key in schema]
    parts += [(f"{key}/{i}", p) for key in _LISTS for i, p in enumerate(schema.get(key, ()))]
    parts += [(f"{key}/{name}", p) for key in _MAPS for name, p in schema.get(key, {}).items()]
    for place, part in parts:
        _prepare_part(part, f"{at}/{place}")


def _list_unsupported(schema: dict[str, Any]) -> Iterator[str]:
    """What a schema says by itself that xgrammar would ignore."""
    for keyword in _IGNORED:
        if schema.get(keyword, False) is not False:
            yield f"{keyword!r} cannot be expressed; leave it out"
    for keyword in _CHOICES:
        beside = [key for key in _IGNORED_BESIDE_CHOICES if key in schema]
        if keyword in schema and beside:
            yield f"{beside[0]!r} beside {keyword!r} cannot be expressed"
    reference = schema.get("$ref", "#")
    if reference != "#" and not reference.startswith("#/"):
        yield f"$ref {reference!r:.60} is not in this schema; allowed: #/$defs/NAME"
    if len(schema.get("allOf", ())) > 1:
        yield "'allOf' can be expressed with one schema in it"
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        count = max((int(n) for found in _REPEATS.findall(pattern) for n in found if n), default=0)
        if count > _MAX_REPEATS:
            yield (
                f"the pattern {pattern!r:.60} repeats a part {count} times; at most "
                f"{_MAX_REPEATS} can be expressed"
            )


def warn_of_invalid(request: ModelRequest, reply: Message) -> None:
    """Says on the terminal where a finished reply is not what its schemas ask for.

    A schema that is violated in the same way is reported once.
    """
    response_format = request.rules.response_format or {}
    functions = {t["function"]["name"]: t["function"] for t in request.inputs.tools}
    calls = reply.get("tool_calls") or ()
    if response_format.get("type") == "json_schema" and not calls:
        schema = response_format["json_schema"]["schema"]
        _judge("response_format", schema, reply.get("content") or "")
    for call in calls:
        function = functions.get(call["function"]["name"], {})
        if function.get("strict") and function.get("parameters"):
            where = f"the parameters of {function['name']!r}"
            _judge(where, function["parameters"], call["function"]["arguments"])


def _judge(where: str, schema: Any, text: str) -> None:
    try:
        value = json.loads(text)
        for error in require_jsonschema().Draft202012Validator(schema).iter_errors(value):
            path = "/".join(["#", *map(str, error.absolute_schema_path)])
            _warn_once(where, f"violates {path}, which xgrammar does not express")
    except json.JSONDecodeError as error:
        _warn_once(where, f"is not JSON: {error.msg}")
    except Exception as error:  # of a pattern that Python cannot read, or a broken reference
        _warn_once(where, f"cannot be judged: {type(error).__name__}: {error}")


@functools.lru_cache(maxsize=1024)
def _warn_once(where: str, problem: str) -> None:
    _log.warning("a reply that was constrained by %s %s", where, problem)
