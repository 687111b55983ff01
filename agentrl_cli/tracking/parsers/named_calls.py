"""Readers of calls whose name stands before the JSON of their arguments."""

from __future__ import annotations

import re
import secrets
import string
from dataclasses import dataclass

from agentrl_cli.tracking.parsers.json_calls import JsonCalls
from agentrl_cli.tracking.parsers.scanning import WAIT, Reading, match_parts
from agentrl_cli.tracking.tool_calls import build_call, decode_json

_NAME = re.compile(r"[^\s<\[{|`]{1,256}")
_NUMBERED_NAME = re.compile(r"(?:functions\.)?(.+):\d+")
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCalls:
    """Calls such as ``<begin>NAME<separator>{...}<end>``, as DeepSeek and Kimi write them.

    White space between the parts does not count.
    """

    section: str
    """What may stand before the first call."""
    before_name: tuple[str, ...]
    before_arguments: tuple[str, ...]
    end: tuple[str, ...]
    closers: tuple[str, ...]
    is_numbered: bool = False
    """True: what stands in the name's place is the call's id, such as ``functions.NAME:0``."""
    only_first: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The section's beginning, and a call's."""
        return (self.section, self.before_name[0])

    def read(self, text: str, at_end: bool) -> Reading:
        """The call that ``text`` begins with."""
        in_section = text.startswith(self.section)
        refused = Reading(len(self.section if in_section else self.before_name[0]))
        parts = (self.section, *self.before_name) if in_section else self.before_name
        at = match_parts(text, 0, parts, at_end=at_end)
        if at is None:
            return refused
        while 0 <= at < len(text) and text[at].isspace():
            at += 1
        found = _NAME.match(text, at) if at >= 0 else None
        if at < 0 or (found is None and at == len(text)):
            return refused if at_end else WAIT
        if found is None:
            return refused
        begin = match_parts(text, found.end(), self.before_arguments, at_end=at_end)
        if begin is None:
            return refused
        opening = text[begin:].lstrip()[:1] if begin >= 0 else ""
        if opening not in ("", "{"):
            return refused
        try:
            data, end = decode_json(text, begin) if opening else (None, 0)
        except (ValueError, RecursionError):
            opening = ""
        if not opening:
            return refused if at_end else WAIT
        return self._finish(text, found.group(), data, end, at_end, refused)

    def _finish(
        self, text: str, name: str, data: object, at: int, at_end: bool, refused: Reading
    ) -> Reading:
        end = match_parts(text, at, self.end, at_end=at_end, may_stop=True)
        if end == -1:
            return WAIT
        call_id = None
        if self.is_numbered:
            numbered = _NUMBERED_NAME.fullmatch(name)
            if numbered is None:
                return refused
            call_id, name = name, numbered.group(1)
        call = build_call(name, data, call_id)
        return refused if end is None or call is None else Reading(end, [call])


_MISTRAL_START = "[TOOL_CALLS]"
_MISTRAL_ID = re.compile(r"\s*\[CALL_ID\](\w*)")
_MISTRAL_LIST = JsonCalls(starts=(_MISTRAL_START,))


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """``[TOOL_CALLS]NAME[ARGS]{...}``, and the list of objects of Mistral's older models."""

    starts: tuple[str, ...] = (_MISTRAL_START,)
    closers: tuple[str, ...] = ()
    only_first: bool = False

    def read(self, text: str, at_end: bool) -> Reading:
        """The call, or the list of calls, that ``text`` begins with."""
        rest = text[len(_MISTRAL_START) :].lstrip()
        if rest[:1] in ("{", "["):
            reading = _MISTRAL_LIST.read(text, at_end)
            for call in reading.calls:
                call["id"] = make_mistral_id()
            return reading
        refused = Reading(len(_MISTRAL_START))
        unknown = refused if at_end else WAIT
        name = _NAME.match(rest)
        if name is None:
            return refused if rest else unknown
        at = name.end()
        call_id = _MISTRAL_ID.match(rest, at)
        if call_id is not None:
            at = call_id.end()
        arguments = match_parts(rest, at, ("[ARGS]",), at_end=at_end)
        if arguments is None:
            partial = rest[at:].lstrip()
            if not partial.startswith("{"):
                is_partial = call_id is None and "[CALL_ID]".startswith(partial)
                return unknown if is_partial else refused
            arguments = at
        if arguments < 0 or not rest[arguments:].strip():
            return unknown
        if rest[arguments:].lstrip()[0] != "{":
            return refused
        try:
            data, end = decode_json(rest, arguments)
        except (ValueError, RecursionError):
            return unknown
        built = build_call(
            name.group(), data, (call_id.group(1) if call_id else "") or make_mistral_id()
        )
        return refused if built is None else Reading(len(text) - len(rest) + end, [built])


def make_mistral_id() -> str:
    """An id as Mistral's templates demand it: nine letters or digits."""
    return "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(9))
