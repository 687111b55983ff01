"""Readers of calls whose arguments are JSON: with the name inside of it, or before it."""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.tracking.formats.call_scanner import (
    CallReader,
    Cursor,
    Reading,
    Unfinished,
    Unreadable,
    build_call,
    decode_json,
)

_NAME = re.compile(r"[^\s<\[{|`]{1,256}")
_NUMBERED_NAME = re.compile(r"(?:functions\.)?(.+):\d+")
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits
_MISTRAL_START = "[TOOL_CALLS]"
_MISTRAL_ID = re.compile(r"\s*\[CALL_ID\](\w*)")


def build_call_of_object(data: Any, keys: tuple[str, ...]) -> dict[str, Any] | None:
    """The call that a JSON object with ``name`` and one of ``keys`` describes, or None.

    Without keys it is ``{name: arguments}``.
    """
    if not isinstance(data, dict):
        return None
    if not keys and len(data) == 1:
        [(name, arguments)] = data.items()
        return build_call(name, arguments)
    key = next((key for key in keys if key in data), None)
    return None if key is None else build_call(data.get("name"), data[key])


@dataclass(slots=True, kw_only=True)
class JsonCalls(CallReader):
    """Calls such as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    starts: tuple[str, ...]
    end: str = ""
    """Empty: a call ends where its JSON does."""
    keys: tuple[str, ...] = ("arguments",)
    """As in :func:`build_call_of_object`."""
    is_listed: bool = False
    """True: the JSON is a list. Each of its objects is a call; those that are not stay text."""

    def read_calls(self, cursor: Cursor) -> Reading:
        """The call, or the calls, that the text begins with."""
        cursor.take(*self.starts)
        if self.is_listed:
            return self._read_list(cursor)
        data = cursor.take_json()
        self._close(cursor)
        return cursor.end_call(build_call_of_object(data, self.keys))

    def _read_list(self, cursor: Cursor) -> Reading:
        """The objects of a list one by one, so that a list cut off keeps those it has."""
        cursor.expect("[")
        reading, text = Reading(), cursor.text
        while True:
            while text[cursor.at : cursor.at + 1].isspace() or text.startswith(",", cursor.at):
                cursor.at += 1
            begin = cursor.at
            if text.startswith("]", begin):
                cursor.at += 1
                try:
                    self._close(cursor)
                except Unreadable:
                    cursor.at = begin + 1
                break
            try:
                data, cursor.at = decode_json(text, begin)
            except (ValueError, RecursionError):
                if not (cursor.at_end and reading.calls):
                    raise Unfinished from None
                reading.is_malformed = True
                break
            call = build_call_of_object(data, self.keys)
            if call is None:
                reading.text += text[begin : cursor.at]
                reading.is_malformed = True
            else:
                reading.calls.append(call)
        reading.length = cursor.at
        if not reading.calls:
            raise Unreadable
        return reading

    def _close(self, cursor: Cursor) -> None:
        if self.end:
            cursor.close(self.end)


class BareJsonCalls(CallReader):
    """Calls as Llama 3 and 4 write them: a JSON object, and nothing around it but marks.

    An object is a call only with a name and arguments, for an answer may be JSON as well. Llama 4
    writes text, mostly none, between two marks before it.
    """

    starts = ("<|python_tag|>", "<|python_start|>", "{")
    closers = (";", ",", "<|python_end|>")

    def read_calls(self, cursor: Cursor) -> Reading:
        """The call that the text begins with."""
        text = ""
        mark = cursor.take("<|python_tag|>", "<|python_start|>")
        if mark == "<|python_start|>":
            text = self._take_text(cursor)
        if cursor.peek() == "{" and not _may_be_call(cursor.text[cursor.at :]):
            raise Unreadable
        data = cursor.take_json()
        if isinstance(data, dict) and "name" not in data:
            data = {**data, "name": data.get("function")}
        call = build_call_of_object(data, ("parameters", "arguments"))
        if call is None:
            return Reading(cursor.at, is_malformed=mark is not None)
        return Reading(cursor.at, [call], text)

    def _take_text(self, cursor: Cursor) -> str:
        """What stands between Llama 4's marks, if the call follows them."""
        if cursor.peek() == "{":
            return ""
        text = cursor.take_until("<|python_end|>")
        return text if text.strip() else ""


def _may_be_call(text: str) -> bool:
    """Whether an object that begins so may have the keys of a call."""
    first = text[1:].lstrip()
    keys = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')
    return any(key.startswith(first[: len(key)]) for key in keys)


@dataclass(slots=True, kw_only=True)
class NamedCalls(CallReader):
    """Calls such as ``<begin>NAME<separator>{...}<end>``, as DeepSeek and Kimi write them.

    White space between the parts does not count.
    """

    section: str
    """What may stand before the first call."""
    before_name: tuple[str, ...]
    before_arguments: tuple[str, ...]
    end: tuple[str, ...]
    closers: tuple[str, ...]
    starts: tuple[str, ...] = field(init=False)
    is_numbered: bool = False
    """True: what stands in the name's place is the call's id, such as ``functions.NAME:0``."""

    def __post_init__(self) -> None:
        self.starts = (self.section, self.before_name[0])

    def read_calls(self, cursor: Cursor) -> Reading:
        """The call that the text begins with."""
        if cursor.text.startswith(self.section):
            cursor.expect(self.section)
        cursor.expect(*self.before_name)
        name = cursor.match(_NAME)
        cursor.expect(*self.before_arguments)
        data = cursor.take_json()
        cursor.close(*self.end)
        call_id = None
        if self.is_numbered:
            numbered = _NUMBERED_NAME.fullmatch(name)
            if numbered is None:
                raise Unreadable
            call_id, name = name, numbered.group(1)
        return cursor.end_call(build_call(name, data, call_id))


class MistralCalls(CallReader):
    """``[TOOL_CALLS]NAME[ARGS]{...}``, and the list of objects of Mistral's older models."""

    starts = (_MISTRAL_START,)
    _objects = JsonCalls(starts=(_MISTRAL_START,))
    _lists = JsonCalls(starts=(_MISTRAL_START,), is_listed=True)

    def read_calls(self, cursor: Cursor) -> Reading:
        """The call, or the list of calls, that the text begins with."""
        cursor.expect(_MISTRAL_START)
        if (opening := cursor.peek()) in ("{", "["):
            listed = self._lists if opening == "[" else self._objects
            reading = listed.read(cursor.text, cursor.at_end)
            for call in reading.calls:
                call["id"] = make_mistral_id()
            return reading
        name = cursor.match(_NAME)
        call_id = _MISTRAL_ID.match(cursor.text, cursor.at)
        if call_id is not None:
            cursor.at = call_id.end()
        if cursor.peek() != "{":
            if call_id is None and cursor.is_partial("[CALL_ID]"):
                raise Unfinished
            cursor.expect("[ARGS]")
        data = cursor.take_json()
        known_id = call_id.group(1) if call_id is not None else ""
        return cursor.end_call(build_call(name, data, known_id or make_mistral_id()))


def make_mistral_id() -> str:
    """An id as Mistral's templates demand it: nine letters or digits."""
    return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))
