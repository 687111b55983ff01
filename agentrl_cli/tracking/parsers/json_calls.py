"""Readers of calls whose name and arguments are one JSON object, or a list of such objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl_cli.tracking.parsers.scanning import WAIT, Reading, match_parts
from agentrl_cli.tracking.tool_calls import build_call_of_object, decode_json

#: Makes a call of one JSON object, or finds that it describes none.
CallBuilder = Callable[[Any], dict[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonCalls:
    """Calls such as ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

    Where the JSON is a list, each of its objects is a call; those that are none stay text.
    """

    starts: tuple[str, ...]
    end: str = ""
    """Empty: a call ends where its JSON does."""
    closers: tuple[str, ...] = ()
    only_first: bool = False
    argument_keys: tuple[str, ...] = ("arguments", "parameters")
    build: CallBuilder | None = None
    """null: an object with a name and one of ``argument_keys``."""

    def read(self, text: str, at_end: bool) -> Reading:
        """The call, or the calls, that ``text`` begins with."""
        start = next(start for start in self.starts if text.startswith(start))
        refused = Reading(len(start))
        opening = text[len(start) :].lstrip()[:1]
        if opening not in ("", "{", "["):
            return refused
        if opening == "[":
            return self._read_list(text, text.index("[", len(start)), at_end) or refused
        try:
            data, at = decode_json(text, len(start))
        except (ValueError, RecursionError):
            return refused if at_end else WAIT
        end = self._find_end(text, at, at_end)
        if end == -1:
            return WAIT
        call = self._build(data)
        return refused if end is None or call is None else Reading(end, [call])

    def _read_list(self, text: str, at: int, at_end: bool) -> Reading | None:
        """The objects of a list one by one, so that a list cut off keeps those it has."""
        reading = Reading()
        at += 1
        while True:
            while at < len(text) and (text[at].isspace() or text[at] == ","):
                at += 1
            if text[at : at + 1] == "]":
                end = self._find_end(text, at + 1, at_end)
                if end == -1:
                    return WAIT
                reading.length = at + 1 if end is None else end
                break
            try:
                data, end = decode_json(text, at)
            except (ValueError, RecursionError):
                if not at_end:
                    return WAIT
                reading.length = at
                break
            call = self._build(data)
            if call is None:
                reading.text += text[at:end]
            else:
                reading.calls.append(call)
            at = end
        return reading if reading.calls else None

    def _find_end(self, text: str, at: int, at_end: bool) -> int | None:
        if not self.end:
            return at
        return match_parts(text, at, (self.end,), at_end=at_end, may_stop=True)

    def _build(self, data: Any) -> dict[str, Any] | None:
        if self.build is not None:
            return self.build(data)
        return build_call_of_object(data, self.argument_keys)


@dataclass(frozen=True, slots=True)
class BareJsonCalls:
    """Calls as Llama 3 writes them: a JSON object and nothing around it.

    An object is a call only with a name and arguments, for an answer may be JSON as well.
    """

    starts: tuple[str, ...] = ("<|python_tag|>", "{")
    closers: tuple[str, ...] = (";", ",")
    only_first: bool = False

    def read(self, text: str, at_end: bool) -> Reading:
        """The call that ``text`` begins with."""
        start = next(start for start in self.starts if text.startswith(start))
        begin = 0 if start == "{" else len(start)
        refused = Reading(len(start))
        rest = text[begin:].lstrip()
        if rest and (rest[0] != "{" or not _may_be_call(rest)):
            return refused
        try:
            data, end = decode_json(text, begin)
        except (ValueError, RecursionError):
            return refused if at_end else WAIT
        named = isinstance(data, dict) and not {"parameters", "arguments"}.isdisjoint(data)
        if named and "name" not in data:
            data = {**data, "name": data.get("function")}
        call = build_call_of_object(data, ("parameters", "arguments")) if named else None
        return Reading(end) if call is None else Reading(end, [call])


def _may_be_call(text: str) -> bool:
    """Whether an object that begins so may have the keys of a call."""
    first = text[1:].lstrip()
    keys = ('"name"', '"type"', '"function"', '"parameters"', '"arguments"', '"id"')
    return any(key.startswith(first[: len(key)]) for key in keys)


def build_call_of_pair(data: Any) -> dict[str, Any] | None:
    """The call that ``{name: arguments}`` describes, or None."""
    if not isinstance(data, dict) or len(data) != 1:
        return None
    [(name, arguments)] = data.items()
    return build_call_of_object({"name": name, "arguments": arguments}, ("arguments",))
