"""Arguments that are written as bare text become what the tool's schema says."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl_cli.tracking.formats.xml_calls import ArgumentTypes


def convert(schema: Any, text: str, **parameters: Any) -> Any:
    parameters = {"type": "object", "properties": {"x": schema}, **parameters}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return ArgumentTypes([tool]).convert("f", "x", text)


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, " kept\n", " kept\n"),
        ({"type": "string", "minLength": 1}, "  kept", "  kept"),
        ({"type": "integer"}, "12", 12),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "1"}, "1", "1"),
        ({}, "12", 12),
        ({}, "text", "text"),
        # What xgrammar lets a model write around a string that is not free.
        ({"enum": ["a", " b "]}, "\t a\n", "a"),
        ({"enum": ["a", " b "]}, " b ", " b "),
        ({"const": "a"}, "\na", "a"),
        ({"type": "string", "pattern": "^[a-c]+$"}, " \rab", "ab"),
        ({"type": "string", "format": "date"}, "2026-01-01\n", "2026-01-01"),
        ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, "\tab", "ab"),
    ],
)
def test_text_becomes_what_the_schema_says(schema: Any, text: str, expected: Any) -> None:
    found = convert(schema, text)
    assert (found, type(found)) == (expected, type(expected))


def test_references_are_followed() -> None:
    definitions = {
        "Zip": {"type": "string"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Maybe": {"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]},
    }
    for schema, text, expected in (
        ({"$ref": "#/$defs/Zip"}, "01234", "01234"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "default": "1"}, "12", "12"),
        ({"$ref": "#/$defs/Maybe"}, "12", "12"),
        ({"$ref": "#/$defs/Maybe"}, "null", None),
        ({"$ref": "#/$defs/Loop"}, "12", 12),
        ({"$ref": "#/$defs/Nowhere"}, "12", 12),
        ({"$ref": 5}, "text", "text"),
    ):
        assert convert(schema, text, **{"$defs": definitions}) == expected


@pytest.mark.parametrize(
    "schema",
    [
        None, 5, [], "string", {"type": 5}, {"type": [["string"]]}, {"type": {}}, {"anyOf": 5},
        {"anyOf": "string"}, {"oneOf": [5, None]}, {"enum": 5}, {"enum": [[1], {}]},
        {"type": "string", "enum": [["1"]], "maxLength": "2"}, {"$ref": []},
    ],
)  # fmt: skip
def test_schema_that_is_none_raises_nothing(schema: Any) -> None:
    for text in ("1", "text", " ", '{"a": 1}'):
        convert(schema, text)


def test_choices_within_choices_end() -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(900):
        schema = {"anyOf": [schema, {"type": "null"}]}
    assert convert(schema, "12") == 12
