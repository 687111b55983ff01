"""Rules of a request as a grammar: which replies it lets through, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.engine import grammar
from agentrl_cli.engine.grammar import (
    GrammarError,
    TokenGrammars,
    TokenMatcher,
    check_structural_tag,
    require_xgrammar,
)
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.tracking import structured_output
from agentrl_cli.tracking.formats.format_choice import find_reasoning_format, find_tool_call_format
from agentrl_cli.tracking.formats.format_table import TOOL_CALL_FORMATS
from agentrl_cli.tracking.formats.reply_formats import ReplyContext, ReplyFormats
from agentrl_cli.tracking.protocols.model_request import ModelRequest, ReplyRules, RequestError
from agentrl_cli.tracking.structured_output import (
    MAX_NESTING,
    SchemaError,
    build_structural_tag,
    constrain,
    prepare_schema,
)
from agentrl_cli.tracking.template import make_template_inputs

PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "s": {"type": "string"}},
    "required": ["x"],
}
ANSWER = {
    "type": "json_schema",
    "json_schema": {
        "name": "answer",
        "schema": {"type": "object", "properties": {"r": {"type": "number"}}, "required": ["r"]},
    },
}
HERMES = ReplyFormats(tool_calls=find_tool_call_format("hermes"))
REQUIRED = ReplyRules(tool_choice="required")
CONSTRAINABLE = [name for name, one in TOOL_CALL_FORMATS.items() if one.grammar is not None]


def make_tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS, **function}}


TOOLS = [make_tool("add"), make_tool("sub")]


class ByteGrammar:
    """A tag over the bytes as tokens; 0 ends a text."""

    def __init__(self, tag: str) -> None:
        self._compiled = grammar._compile(grammar._build_byte_compiler(), tag)

    def start(self) -> TokenMatcher:
        return TokenMatcher(require_xgrammar().GrammarMatcher(self._compiled))

    def accepts(self, text: str) -> bool:
        matcher = self.start()
        return all(matcher.accept(byte + 1) for byte in text.encode()) and matcher.accept(0)

    def write(self, chance: random.Random, max_bytes: int = 400) -> str | None:
        """A text by chance; None: it did not end."""
        matcher, masks, text = self.start(), np.empty((1, 9), np.int32), bytearray()
        for _ in range(max_bytes):
            assert matcher.fill(masks, 0)
            bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")[:257]
            allowed = bits.nonzero()[0].tolist()
            # What ends something comes more often, so that texts end.
            likely = [token for token in allowed if token == 0 or chr(token - 1) in '"}],1']
            token = chance.choice(likely if likely and chance.random() < 0.6 else allowed)
            assert matcher.accept(token)
            if token == 0:
                return text.decode("utf-8", "replace")
            text.append(token - 1)
        return None


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def check_grammar(tag: str | None, good: list[str], bad: list[str]) -> None:
    assert tag is not None
    byte_grammar = ByteGrammar(tag)
    assert [text for text in good if not byte_grammar.accepts(text)] == []
    assert [text for text in bad if byte_grammar.accepts(text)] == []


ADD, SUB = call("add", '{"x": 1}'), call("sub", '{"x": 2, "s": "</tool_call>"}')


ONE = {"parallel_tool_calls": False}
OBJECT = {"type": "json_object"}


@pytest.mark.parametrize(
    ("rules", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [ADD, SUB, f"{ADD}\n{SUB}"],
            ["", "text", f"hi {ADD}", call("mul", "{}"), call("add", '{"x": "a"}'), ADD[:-1]],
        ),
        ({"tool_choice": "required", **ONE}, [ADD, SUB], [f"{ADD}\n{SUB}"]),
        ({"tool_choice": "required", "callable_tools": ("sub",), **ONE}, [SUB], [ADD]),
        (
            {"response_format": ANSWER},
            ['{"r": 1.5}', '{"r":1}', ADD, f"{ADD}\n{SUB}"],
            ["{}", "text", "", '{"r": "x"}', f'{{"r": 1}}{ADD}'],
        ),
        (
            {"response_format": OBJECT, "callable_tools": ()},
            ["{}", '{"a": [1, {"b": null}]}'],
            ["[]", "1", ADD, "{} and more"],
        ),
        (
            {"callable_tools": ("add",)},
            ["", "text", ADD, f"first {ADD} then {ADD}"],
            [SUB, f"text {SUB}", '<tool_call>{"name": "sub"'],
        ),
        ({"callable_tools": ("add",), **ONE}, ["text", f"first {ADD}"], [f"{ADD}\n{ADD}", SUB]),
    ],
)
def test_a_grammar_lets_through_what_the_rules_ask_for(
    rules: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    check_grammar(build_structural_tag(ReplyRules(**rules), TOOLS, HERMES), good, bad)


@pytest.mark.parametrize(
    ("prompt_end", "good", "bad"),
    [
        (
            "<|im_start|>assistant\n",
            [ADD, f"<think>hm</think>\n\n{ADD}", f"<think>\n\n</think>{ADD}"],
            [f"hm</think>{ADD}", f"<think>{ADD}", "<think>hm</think>"],
        ),
        (
            "<|im_start|>assistant\n<think>\n",
            [f"hm</think>\n\n{ADD}", f"</think>{ADD}"],
            [ADD, f"<think>{ADD}"],
        ),
    ],
)
def test_a_model_may_reason_before_a_call(prompt_end: str, good: list[str], bad: list[str]) -> None:
    formats = ReplyFormats(
        tool_calls=find_tool_call_format("hermes"), reasoning=find_reasoning_format("qwen3")
    )
    tag = build_structural_tag(REQUIRED, TOOLS, formats, prompt_end=prompt_end)
    check_grammar(tag, good, bad)


@pytest.mark.parametrize("rules", [{}, {"callable_tools": ()}, ONE])
def test_a_free_reply_has_no_grammar(rules: dict[str, Any]) -> None:
    assert build_structural_tag(ReplyRules(**rules), TOOLS, HERMES) is None


@pytest.mark.parametrize("name", CONSTRAINABLE)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_is_written_under_a_grammar_is_what_its_parser_reads(
    name: str, parallel: bool
) -> None:
    """A required call, in every format: its name and arguments come out as they were written."""
    formats = ReplyFormats(tool_calls=TOOL_CALL_FORMATS[name])
    rules = ReplyRules(tool_choice="required", parallel_tool_calls=parallel)
    bounded = {"type": "integer", "minimum": 0, "maximum": 99}
    parameters = {"type": "object", "properties": {"x": bounded}, "required": ["x"]}
    tools = [make_tool(one, parameters=parameters) for one in ("add", "sub")]
    tag = build_structural_tag(rules, tools, formats)
    assert tag is not None
    byte_grammar, chance = ByteGrammar(tag), random.Random(0)
    num_read = 0
    for _ in range(12):
        text = byte_grammar.write(chance, 600)
        if text is None:
            continue
        parser = formats.tool_calls.build_parser(ReplyContext(tools=tools))  # type: ignore[union-attr]
        parsed = parser.feed(text)
        parsed.add(parser.finish())
        assert parsed.content.strip() == "", text
        assert len(parsed.tool_calls) >= 1, text
        assert parallel or len(parsed.tool_calls) == 1
        for one in parsed.tool_calls:
            assert one["function"]["name"] in ("add", "sub")
            assert json.loads(one["function"]["arguments"])["x"] in range(100), text
        num_read += 1
    assert num_read >= 6


def refusal(problem: str, *, parser: str = "hermes", function: Any = None, **rules: Any) -> Any:
    tools = TOOLS if function is None else [make_tool(**{"name": "f", **function})]
    formats = ReplyFormats(tool_calls=find_tool_call_format(parser) if parser else None)
    asked = rules or {"tool_choice": "required"}
    return pytest.param(ReplyRules(**asked), tools, formats, problem, id=problem)


@pytest.mark.parametrize(
    ("rules", "tools", "formats", "problem"),
    [
        (REQUIRED, [], HERMES, "asks for a call, and no tools are offered"),
        refusal("'mul'; tools: add, sub", tool_choice="required", callable_tools=("mul",)),
        refusal("set engine.tool_call_parser", parser=""),
        refusal("cannot be constrained to calls in the format 'pythonic'", parser="pythonic"),
        refusal(f"it can with {', '.join(CONSTRAINABLE)}", parser="pythonic"),
        refusal("the tool name 'a\"b' cannot be asked for", function={"name": 'a"b'}),
        refusal("must be of type 'object'", function={"parameters": {"type": "array"}}),
        refusal(
            "'f': parameters at #: 'required' names 'y'",
            function={"parameters": {"type": "object", "required": ["y"]}},
        ),
        refusal(
            "'not' cannot be expressed",
            function={"parameters": {"type": "object", "not": {}}, "strict": True},
        ),
        refusal(
            "response_format.json_schema.schema at #: 'not' cannot be expressed",
            response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
        ),
        refusal(
            "a response_format cannot be asked of a model that writes",
            parser="openai",
            response_format=ANSWER,
        ),
    ],
)
def test_what_cannot_be_asked_for_is_refused_in_words(
    rules: ReplyRules, tools: list[Any], formats: ReplyFormats, problem: str
) -> None:
    with pytest.raises(RequestError) as caught:
        build_structural_tag(rules, tools, formats)
    assert problem in str(caught.value)


def test_a_tool_that_promises_too_much_accepts_any_object_unless_it_is_strict() -> None:
    schema = {"type": "object", "properties": {"x": {"not": {"const": 0.5}}}}
    tag = build_structural_tag(REQUIRED, [make_tool("f", parameters=schema)], HERMES)
    assert tag is not None
    assert ByteGrammar(tag).accepts(call("f", '{"anything": [1]}'))
    assert not ByteGrammar(tag).accepts(call("f", "[1]"))


def make_request(**rules: Any) -> ModelRequest:
    return ModelRequest(
        messages=({"role": "user", "content": "x"},),
        inputs=make_template_inputs(TOOLS, {}),
        sampling=Sampling(stop=("END",)),
        rules=ReplyRules(**rules),
    )


async def test_one_call_a_turn_ends_where_the_first_call_does() -> None:
    free = await constrain(make_request(parallel_tool_calls=False), HERMES, "")
    assert (free.stop, free.structural_tag) == (("END", "</tool_call>"), None)
    held = await constrain(
        make_request(parallel_tool_calls=False, tool_choice="required"), HERMES, ""
    )
    assert held.stop == ("END",)
    assert held.structural_tag is not None


async def test_what_xgrammar_refuses_is_a_refused_request() -> None:
    schema = {"type": "string", "pattern": "^(a)\\1$"}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(RequestError, match="Backreference") as caught:
        await constrain(make_request(response_format=response_format), HERMES, "")
    assert caught.value.param == "response_format"
    # Its place in xgrammar's source is nobody's business.
    assert ".cc" not in str(caught.value)


@pytest.mark.slow
async def test_a_grammar_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_CHECK_SECONDS", 0.001)
    parts = {f"p{i}": {"type": "string", "pattern": "^([a-z]{1,40}-){1,40}$"} for i in range(60)}
    schema = {"type": "object", "properties": parts}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    with pytest.raises(RequestError, match="no grammar was made of its schemas within"):
        await constrain(make_request(response_format=response_format), HERMES, "")


async def test_without_xgrammar_it_is_said_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    structured_output._check_tag.cache_clear()
    grammar._build_byte_compiler.cache_clear()
    with pytest.raises(RequestError, match=r"pip install 'agentrl-cli\[constrained\]'"):
        await constrain(make_request(tool_choice="required"), HERMES, "")
    free = await constrain(make_request(), HERMES, "")
    assert free.structural_tag is None
    with pytest.raises(MissingExtraError):
        TokenGrammars(None, 10, [0]).start("{}")


_SCALARS = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("integer")},
        optional={"minimum": st.integers(-9, 0), "maximum": st.integers(1, 99)},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")},
        optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 5)},
    ),
    st.sampled_from(
        [
            {"type": "number"},
            {"type": "boolean"},
            {"type": ["null", "string"]},
            {"enum": ["a", 1, None, "é\n"]},
            {"type": "string", "pattern": "^[a-c]+-\\d{2}$"},
            {"type": "string", "pattern": "^[^x]$"},
        ]
    ),
)


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def close(properties: dict[str, Any]) -> dict[str, Any]:
        required = list(properties)[::2]
        return {"type": "object", "properties": properties, "required": required}

    return st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", 'q"', "é"]), inner, max_size=3).map(close),
        inner.map(lambda item: {"type": "array", "items": item, "maxItems": 2}),
        inner.map(lambda item: {"type": "object", "additionalProperties": item}),
        st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: {"type": "array", "prefixItems": parts, "items": False}
        ),
    )


@settings(max_examples=150, deadline=None)
@given(schema=st.recursive(_SCALARS, _nest, max_leaves=5), seed=st.integers(0, 2**32))
def test_whatever_is_written_under_a_schema_validates(schema: Any, seed: int) -> None:
    try:
        prepare_schema(schema)
    except SchemaError:
        return
    rules = ReplyRules(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    tag = build_structural_tag(rules, [], HERMES)
    assert tag is not None
    text = ByteGrammar(tag).write(random.Random(seed))
    if text is not None:
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


INTEGER = {"type": "integer"}
STRING = {"type": "string"}
TAGGED = [
    {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
    for kind in ("cat", "dog")
]


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def compile_schema(schema: Any) -> None:
    content = {"type": "json_schema", "json_schema": prepare_schema(schema)}
    check_structural_tag(json.dumps({"type": "structural_tag", "format": content}))


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
        {"type": ["string", "null"], "title": "T", "description": "d", "default": None},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "password", "minLength": 3},
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3, "uniqueItems": False},
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
        {"type": "object", "patternProperties": {"^x$": INTEGER}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "string", "enum": ["a", "b"]},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": INTEGER}, "description": "as pydantic"},
        {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        nest(MAX_NESTING // 2),
    ],
)
def test_what_can_be_expressed_passes(schema: dict[str, Any]) -> None:
    compile_schema(schema)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        # What xgrammar would pass over.
        ({"not": INTEGER}, "at #: 'not' cannot be expressed"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "at #: 'uniqueItems'"),
        ({"if": {}, "then": {}}, "at #: 'if'"),
        ({"allOf": [INTEGER, {"enum": [1]}]}, "'allOf' can be expressed with one schema"),
        ({"anyOf": [INTEGER], "type": "integer"}, "'type' beside 'anyOf'"),
        ({"$ref": "#/$defs/x", "properties": {}, "$defs": {"x": {}}}, "'properties' beside"),
        ({"$ref": "https://example.com/x"}, "is not in this schema"),
        ({"type": "string", "pattern": "^[a-z]{1,129}$"}, "repeats a part 129 times"),
        (
            {"type": "object", "properties": {"a": {"items": {"not": {}}, "type": "array"}}},
            "at #/properties/a/items: 'not'",
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [INTEGER, {"not": {}}]}}},
            "at #/$defs/x/anyOf/1: 'not'",
        ),
        # What is no schema.
        ([], "a schema is a JSON object, found []"),
        ({"type": "int"}, "at #/type: 'int' is not one of ['array', 'boolean', 'integer'"),
        ({"type": "object", "properties": {"a": 3}}, "at #/properties/a: 3 is not of type"),
        ({"type": "object", "required": ["a"]}, "'required' names 'a', which 'properties' lacks"),
        ({"const": "a\0b"}, "holds a NUL character"),
        (nest(MAX_NESTING), f"nested deeper than {MAX_NESTING} levels"),
        # What no grammar can be made of.
        ({"$ref": "#"}, "allows no text"),
        ({"$ref": "#/$defs/x", "$defs": {}}, "Cannot find field x"),
        ({"anyOf": [False]}, "cannot accept any value"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater than maximum"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_by_its_place(schema: Any, problem: str) -> None:
    with pytest.raises((SchemaError, GrammarError)) as caught:
        compile_schema(schema)
    assert problem in str(caught.value)


def test_lengths_become_patterns_where_a_schema_stands_and_nowhere_else() -> None:
    bounded = {"type": "string", "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {"maxLength": bounded, "list": {"type": "array", "items": bounded}},
        "default": {"minLength": 1},
        "$defs": {"free": {"enum": [{"maxLength": 2}]}},
    }
    written = prepare_schema(schema)
    pattern = written["properties"]["maxLength"]["pattern"]
    assert pattern.endswith("{0,3}$")
    assert written["properties"]["list"]["items"] == {"type": "string", "pattern": pattern}
    assert (written["default"], written["$defs"]) == (schema["default"], schema["$defs"])
    long = {"type": "string", "minLength": 1, "maxLength": 129}
    assert prepare_schema(long) == long


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        ({"type": "number", "multipleOf": 0.5}, "0.3", "violates #/multipleOf, which xgrammar"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "1", "violates #/oneOf"),
        ({"type": "string", "pattern": '^"$'}, '"""', "is not JSON"),
        ({"type": "number", "multipleOf": 0.5}, "1.5", None),
    ],
)
async def test_a_reply_that_does_not_validate_is_reported_once(
    open_client: Any, caplog: pytest.LogCaptureFixture, schema: Any, text: str, problem: str | None
) -> None:
    structured_output._warn_once.cache_clear()
    client = open_client(text, text)
    caplog.set_level("WARNING", logger="agentrl_cli")
    for stream in (False, True):
        await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            stream=stream,
        )
    warnings = [r.getMessage() for r in caplog.records if "constrained by" in r.getMessage()]
    assert len(warnings) == (0 if problem is None else 1)
    assert problem is None or f"response_format {problem}" in warnings[0]


async def test_the_arguments_of_a_strict_tool_are_judged(
    open_client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}}}
    caplog.set_level("WARNING", logger="agentrl_cli")
    for strict in (False, True):
        tools = [make_tool("f", parameters=parameters, strict=strict)]
        await open_client(call("f", '{"x": 0.3}')).chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=tools,
            tool_choice="required",
        )
        found = "the parameters of 'f' violates #/properties/x/multipleOf" in caplog.text
        assert found is strict
