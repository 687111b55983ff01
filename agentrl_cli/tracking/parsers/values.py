"""Arguments that are written as bare text: to JSON data, by the tool's schema."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from agentrl_cli.tracking.parsers.literals import read_literal
from agentrl_cli.tracking.tool_calls import load_json

_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class ArgumentTypes:
    """What the offered tools' schemas say about their parameters."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._properties: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            parameters = function.get("parameters") if isinstance(function, dict) else None
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(function, dict) and isinstance(properties, dict):
                self._properties[str(function.get("name"))] = properties

    def convert(self, tool: str, parameter: str, text: str) -> Any:
        """The data that ``text`` stands for: the text itself where the schema says ``string``.

        Where the schema says nothing, JSON is data and anything else is text.
        """
        schema = self._properties.get(tool, {}).get(parameter)
        types = _list_types(schema)
        if types and types <= {"string"}:
            return text
        data = _read_value(text, types)
        name = _name_type(data)
        fits = not types or name in types or (name == "integer" and "number" in types)
        return data if fits or "string" not in types else text


def _read_value(text: str, types: set[str]) -> Any:
    try:
        data = load_json(text)
    except (ValueError, RecursionError):
        return _read_python(text, types)
    return text if isinstance(data, float) and not math.isfinite(data) else data


def _list_types(schema: Any) -> set[str]:
    """The JSON types that a schema allows; empty: any."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    if not types and isinstance(schema.get("enum"), list):
        types = {_name_type(value) for value in schema["enum"]}
    for key in ("anyOf", "oneOf"):
        for choice in schema.get(key) or ():
            types |= _list_types(choice)
    return types


def _read_python(text: str, types: set[str]) -> Any:
    """Data that is written as Python writes it (``True``, ``{'a': 1}``), else the text."""
    constant = text.strip().lower()
    if constant in _CONSTANTS:
        return _CONSTANTS[constant]
    if types & {"object", "array"}:
        data = read_literal(text)
        return data if isinstance(data, dict | list) else text
    return text


def _name_type(data: Any) -> str:
    if data is None:
        return "null"
    if isinstance(data, bool):
        return "boolean"
    if isinstance(data, int):
        return "integer"
    if isinstance(data, float):
        return "number"
    if isinstance(data, str):
        return "string"
    return "array" if isinstance(data, list) else "object"
