"""Which JSON schemas sampling can be constrained to, and why the others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentrl_cli.engine.grammar import GrammarError, check_structural_tag
from agentrl_cli.tracking.structured_output import MAX_NESTING, SchemaError, prepare_schema

INTEGER = {"type": "integer"}
NODE = {
    "type": "object",
    "properties": {"value": INTEGER, "next": {"$ref": "#/$defs/node"}},
    "required": ["value"],
}
TAGGED = [
    {
        "type": "object",
        "properties": {"kind": {"const": kind}, "x": INTEGER},
        "required": ["kind"],
    }
    for kind in ("cat", "dog")
]


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = INTEGER
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": True}, "required": ["a"]},
        {"type": ["string", "null"], "title": "T", "description": "d", "default": None},
        {"type": "string", "format": "date-time"},
        {"type": "string", "format": "password", "minLength": 3},
        {"type": "string", "pattern": "^[a-z]+-\\d{2}$"},
        {"type": "integer", "minimum": 0, "exclusiveMaximum": 10},
        {"type": "integer", "multipleOf": 3},
        {"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 3, "uniqueItems": False},
        {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False},
        {"type": "object", "additionalProperties": INTEGER, "minProperties": 1},
        {"type": "object", "patternProperties": {"^x$": INTEGER}, "additionalProperties": False},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"enum": ["a", 1, None]},
        {"type": "string", "enum": ["a", "b"]},
        {"const": {"a": [1]}},
        {"anyOf": [INTEGER, {"type": "null"}], "default": None},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": INTEGER}, "description": "as pydantic"},
        {"oneOf": TAGGED, "discriminator": {"propertyName": "kind"}},
        {"oneOf": [INTEGER, {"type": "string"}, {"type": "null"}]},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"type": "object", "properties": {"child": {"$ref": "#"}}},
        {
            "type": "object",
            "properties": {"children": {"type": "array", "items": {"$ref": "#"}}},
            "required": ["children"],
        },
        nest(MAX_NESTING - 1),
    ],
)
def test_what_can_be_expressed_passes(schema: dict[str, Any]) -> None:
    prepare_schema(schema)


@pytest.mark.parametrize(
    ("schema", "at", "problem"),
    [
        ({"not": INTEGER}, "#", "'not' cannot be expressed"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "#", "'uniqueItems'"),
        ({"type": "array", "items": INTEGER, "contains": INTEGER}, "#", "'contains'"),
        ({"if": {}, "then": {}}, "#", "'if'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#", "'dependentRequired'"),
        ({"allOf": [INTEGER, {"enum": [1]}]}, "#", "'allOf' can be expressed with one schema"),
        ({"anyOf": [INTEGER], "minimum": 3}, "#", "'minimum' beside 'anyOf'"),
        ({"$ref": "#/$defs/x", "minLength": 3, "$defs": {"x": {}}}, "#", "'minLength' beside"),
        ({"$ref": "https://example.com/x"}, "#", "is not in this schema"),
        ({"minimum": 3}, "#", "'minimum' needs a 'type' beside it"),
        ({"type": "number", "multipleOf": 0.1}, "#", "'multipleOf'"),
        ({"type": "integer", "multipleOf": 3, "minimum": 1}, "#", "'multipleOf'"),
        ({"type": "integer", "multipleOf": 1025}, "#", "and up to 1024"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "#", "'minLength' beside 'pattern'"),
        ({"type": "string", "format": "uuid", "maxLength": 3}, "#", "'maxLength' beside 'format'"),
        ({"type": "string", "pattern": "^(?!x).*$"}, "#", "looks ahead or behind"),
        ({"type": "string", "pattern": '^"$'}, "#", "names a quote"),
        ({"type": "string", "pattern": "^a\\nb$"}, "#", "a control character"),
        ({"type": "string", "pattern": "^\\\\d$"}, "#", "a backslash"),
        ({"type": "string", "pattern": "^\\x0a$"}, "#", "a control character"),
        ({"type": "string", "pattern": "^[a-z]{1,129}$"}, "#", "repeats a part 129 times"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "#", "may overlap"),
        ({"oneOf": [TAGGED[0], TAGGED[0]]}, "#", "may overlap"),
        (
            {"type": "object", "properties": {"a": {}}, "propertyNames": {"pattern": "a"}},
            "#",
            "'properties' beside 'propertyNames'",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}},
            "#",
            "'properties' beside 'patternProperties'",
        ),
        (
            {"type": "object", "properties": {"a": {"items": {"not": {}}, "type": "array"}}},
            "#/properties/a/items",
            "'not'",
        ),
        (
            {"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [INTEGER, {"not": {}}]}}},
            "#/$defs/x/anyOf/1",
            "'not'",
        ),
    ],
)
def test_what_xgrammar_would_pass_over_is_refused_by_its_place(
    schema: dict[str, Any], at: str, problem: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare_schema(schema)
    assert str(caught.value).startswith(f"at {at}: ")
    assert problem in str(caught.value)
    assert caught.value.is_unsupported


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "a schema is a JSON object, found []"),
        ("integer", "a schema is a JSON object"),
        ({"type": "int"}, "at #/type: 'int' is not one of ['array', 'boolean', 'integer'"),
        ({"type": "object", "properties": {"a": 3}}, "at #/properties/a: 3 is not of type"),
        ({"type": "object", "required": "a"}, "at #/required: 'a' is not of type 'array'"),
        ({"type": "object", "required": ["a"]}, "'required' names 'a', which 'properties' lacks"),
        ({"type": "string", "minLength": -1}, "at #/minLength: -1 is less than the minimum"),
        ({"type": "string", "pattern": 3}, "at #/pattern: 3 is not of type 'string'"),
        ({"type": "integer", "enum": [1, "a"]}, "the value 'a' is not of type integer"),
        ({"anyOf": []}, "at #/anyOf: [] should be non-empty"),
        ({"const": "a\0b"}, "holds a NUL character"),
        (nest(MAX_NESTING), f"nested deeper than {MAX_NESTING} levels"),
    ],
)
def test_a_malformed_schema_is_refused_whoever_asks(schema: Any, problem: str) -> None:
    with pytest.raises(SchemaError) as caught:
        prepare_schema(schema)
    assert problem in str(caught.value)
    assert not caught.value.is_unsupported


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#"}, "allows no text"),
        ({"$ref": "#/$defs/x", "$defs": {}}, "Cannot find field x"),
        ({"enum": []}, "enum array must not be empty"),
        ({"anyOf": [False]}, "cannot accept any value"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "no grammar can be made"),
        ({"type": "array", "minItems": 1}, "minItems is greater"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum greater than maximum"),
    ],
)
def test_what_no_grammar_can_be_made_of_is_refused(schema: Any, problem: str) -> None:
    content = {"type": "json_schema", "json_schema": prepare_schema(schema)}
    with pytest.raises(GrammarError, match=problem):
        check_structural_tag(json.dumps({"type": "structural_tag", "format": content}))


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
    assert written["default"] == schema["default"]
    assert written["$defs"] == schema["$defs"]
    long = {"type": "string", "minLength": 1, "maxLength": 129}
    assert prepare_schema(long) == long
