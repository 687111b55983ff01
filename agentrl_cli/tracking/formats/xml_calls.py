"""Readers of calls whose arguments stand one by one between tags."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.tracking.formats.call_scanner import (
    CallReader,
    Cursor,
    Reading,
    Unfinished,
    Unreadable,
    build_call,
    load_json,
)
from agentrl_cli.tracking.formats.python_calls import read_literal

#: A name, or a key with its attributes, is not longer.
_MAX_HEADER = 400
_NAME = r"[\w.:-]{1,128}"


@dataclass(slots=True, kw_only=True)
class XmlCalls(CallReader):
    """Calls such as ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""

    types: ArgumentTypes
    section: str = ""
    """What may stand before the first call."""
    call_begin: str
    call_header_end: str = ""
    """Empty: the name ends where the next tag begins."""
    key_begin: str
    key_end: str = ">"
    key_pattern: re.Pattern[str]
    """Matches what stands between the last two; group ``key``, and group ``is_text`` where the
    model says itself whether the value is text."""
    value_begin: str = ""
    value_end: str
    call_end: str
    closers: tuple[str, ...] = ()
    has_lines: bool = False
    """True: a value stands on lines of its own, whose breaks are not part of it."""
    starts: tuple[str, ...] = field(init=False)
    _other_call: re.Pattern[str] = field(init=False)
    """What another call begins with: with it in a value, this call was not finished."""
    _other_value: re.Pattern[str] = field(init=False)
    """What another argument's value begins with."""

    def __post_init__(self) -> None:
        self.starts = tuple(start for start in (self.section, self.call_begin) if start)
        begin, header_end, key_begin, key_end, value_begin, call_end = (
            re.escape(text)
            for text in (
                self.call_begin, self.call_header_end, self.key_begin, self.key_end,
                self.value_begin, self.call_end,
            )
        )  # fmt: skip
        self._other_call = re.compile(rf"{begin}{_NAME}{header_end}\s*(?:{key_begin}|{call_end})")
        key = f"{key_begin}{self.key_pattern.pattern}{key_end}"
        self._other_value = re.compile(rf"{key}\s*{value_begin}")

    def read_calls(self, cursor: Cursor) -> Reading:
        """The call that the text begins with."""
        if cursor.text.startswith(self.section):
            cursor.expect(self.section)
        cursor.expect(self.call_begin)
        name = cursor.take_until(self.call_header_end or "<", _MAX_HEADER).strip()
        cursor.at -= not self.call_header_end
        if any(character.isspace() or character in "<{[" for character in name):
            raise Unreadable
        arguments: dict[str, Any] = {}
        while (tag := cursor.take(self.key_begin, self.call_end)) == self.key_begin:
            header = self.key_pattern.fullmatch(cursor.take_until(self.key_end, _MAX_HEADER))
            if header is None:
                raise Unreadable
            cursor.expect(*filter(None, [self.value_begin]))
            value = self._take_value(cursor)
            if self.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            key = header.group("key").strip()
            is_text = header.groupdict().get("is_text")
            arguments[key] = value if is_text == "true" else self.types.convert(name, key, value)
        if tag is None:
            raise Unreadable
        return cursor.end_call(build_call(name, arguments))

    def _take_value(self, cursor: Cursor) -> str:
        """The text up to the end that an argument or the call's end follows: other ends are text.

        An argument inside of the text has an end inside of it too. Where it has not, the end of
        this value is missing, and what follows belongs to the next.
        """
        begin = cursor.at
        while True:
            last = cursor.at
            found = cursor.text.find(self.value_end, last)
            if self._other_call.search(
                cursor.text, last, found if found >= 0 else len(cursor.text)
            ):
                raise Unreadable
            if found < 0:
                raise Unfinished
            cursor.at = found + len(self.value_end)
            if cursor.take(self.key_begin, self.call_end) is not None:
                cursor.at = found + len(self.value_end)
                value = cursor.text[begin:found]
                num_inside = sum(1 for _ in self._other_value.finditer(value))
                if num_inside > value.count(self.value_end):
                    raise Unreadable
                return value


_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
#: White space around a string of which a schema says one of these is not part of it.
_RESTRICTIONS = frozenset({"enum", "const", "pattern", "format"})
#: Choices and references within one another are not followed further.
_MAX_DEPTH = 16


class ArgumentTypes:
    """What the offered tools' schemas say about their parameters; nothing in them is taken for
    granted, for requests without constraints do not have them checked."""

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._parameters: dict[str, dict[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            parameters = function.get("parameters") if isinstance(function, dict) else None
            if isinstance(function, dict) and isinstance(parameters, dict):
                self._parameters[str(function.get("name"))] = parameters

    def convert(self, tool: str, parameter: str, text: str) -> Any:
        """The data that ``text`` stands for: the text itself where the schema says ``string``.

        Where the schema says nothing, JSON is data and anything else is text.
        """
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        choices = list(_list_choices(schema, root))
        types = {name for choice in choices for name in _list_types(choice)}
        if types and types <= {"string"}:
            return _trim(text, choices)
        data = _read_value(text, types)
        name = _name_type(data)
        fits = not types or name in types or (name == "integer" and "number" in types)
        return _trim(text, choices) if "string" in types and (data == text or not fits) else data


def _list_choices(schema: Any, root: dict[str, Any], depth: int = 0) -> Iterator[dict[str, Any]]:
    """The schemas that a value may fit, references and lists of choices resolved."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return
    if "$ref" in schema:
        yield from _list_choices(_follow(schema["$ref"], root), root, depth + 1)
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            yield from _list_choices(part, root, depth + 1)


def _follow(reference: Any, root: dict[str, Any]) -> Any:
    target: Any = root
    for part in str(reference).split("/")[1:]:
        target = target.get(part) if isinstance(target, dict) else None
    return target


def _list_types(schema: dict[str, Any]) -> list[str]:
    """The JSON types that a schema names; empty: it names none."""
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = [name for name in listed if isinstance(name, str)]
    return types or [_name_type(value) for value in _list_values(schema)]


def _list_values(schema: dict[str, Any]) -> list[Any]:
    values = schema.get("enum")
    if "const" in schema:
        return [schema["const"]]
    return values if isinstance(values, list) else []


def _trim(text: str, choices: Sequence[dict[str, Any]]) -> str:
    """A string without the white space that stands for none of it."""
    strings = [choice for choice in choices if "string" in _list_types(choice)]
    if any(text in _list_values(choice) for choice in strings):
        return text
    is_restricted = all(
        _RESTRICTIONS & choice.keys() or _is_longer(text, choice.get("maxLength"))
        for choice in strings
    )
    return text.strip() if is_restricted else text


def _is_longer(text: str, limit: Any) -> bool:
    return isinstance(limit, int) and len(text) > limit


def _read_value(text: str, types: set[str]) -> Any:
    try:
        data = load_json(text)
    except (ValueError, RecursionError):
        return _read_python(text, types)
    return text if isinstance(data, float) and not math.isfinite(data) else data


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
