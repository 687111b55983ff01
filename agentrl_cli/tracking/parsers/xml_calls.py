"""Readers of calls whose arguments stand one by one between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.tracking.parsers.scanning import WAIT, Reading
from agentrl_cli.tracking.parsers.values import ArgumentTypes
from agentrl_cli.tracking.tool_calls import build_call

#: A name, or a key with its attributes, is not longer.
_MAX_HEADER = 400
_NAME = r"[\w.:-]{1,128}"
_GLM_CALL = re.compile(rf"<tool_call>{_NAME}\s*(?:<arg_key>|</tool_call>)")


class _Unreadable(Exception):  # noqa: N818 - no error of anyone's
    """The text is no call, whatever follows."""


class _Unfinished(Exception):  # noqa: N818
    """More text is needed to know."""


@dataclass(slots=True)
class _Cursor:
    text: str
    at: int = 0

    def skip_space(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, *tags: str) -> str | None:
        """Passes the tag that stands here, after white space; None: another text does."""
        self.skip_space()
        for tag in tags:
            if self.text.startswith(tag, self.at):
                self.at += len(tag)
                return tag
        rest = self.text[self.at :]
        if any(tag.startswith(rest) for tag in tags):
            raise _Unfinished
        return None

    def take_until(self, tag: str, limit: int | None = None) -> str:
        """The text before ``tag``, which is passed too."""
        end = self.text.find(tag, self.at)
        length = (len(self.text) if end < 0 else end) - self.at
        if limit is not None and length > limit:
            raise _Unreadable
        if end < 0:
            raise _Unfinished
        found = self.text[self.at : end]
        self.at = end + len(tag)
        return found

    def take_value(self, end: str, followers: Sequence[str], other_call: re.Pattern[str]) -> str:
        """The text up to the ``end`` that one of ``followers`` follows: other ends are text.

        ``other_call`` matches what another call begins with: with it in the value, this one was
        not finished.
        """
        begin = self.at
        while True:
            last = self.at
            found = self.text.find(end, last)
            if other_call.search(self.text, last, found if found >= 0 else len(self.text)):
                raise _Unreadable
            if found < 0:
                raise _Unfinished
            self.at = found + len(end)
            if self.take(*followers) is not None:
                self.at = found + len(end)
                return self.text[begin:found]


@dataclass(frozen=True, slots=True, kw_only=True)
class XmlCalls:
    """Calls such as ``<function=NAME><parameter=KEY>VALUE</parameter></function>``."""

    types: ArgumentTypes
    section: str
    """What may stand before the first call."""
    call_begin: str
    call_header_end: str
    key_begin: str
    key_pattern: re.Pattern[str]
    """Matches what follows ``key_begin`` up to its ``>``; group ``key``, and group ``is_text``
    where the model says itself whether the value is text."""
    value_end: str
    call_end: str
    closers: tuple[str, ...]
    has_lines: bool
    """True: a value stands on lines of its own, whose breaks are not part of it."""
    only_first: bool = False

    @property
    def starts(self) -> tuple[str, ...]:
        """The section's beginning, and a call's."""
        return (self.section, self.call_begin)

    @property
    def _other_call(self) -> re.Pattern[str]:
        begin, header_end, key_begin, call_end = (
            re.escape(text)
            for text in (self.call_begin, self.call_header_end, self.key_begin, self.call_end)
        )
        return re.compile(rf"{begin}{_NAME}{header_end}\s*(?:{key_begin}|{call_end})")

    def read(self, text: str, at_end: bool) -> Reading:
        """The call that ``text`` begins with."""
        refused = Reading(len(next(start for start in self.starts if text.startswith(start))))
        cursor = _Cursor(text)
        try:
            call = self._read_call(cursor)
        except _Unreadable:
            return refused
        except _Unfinished:
            return refused if at_end else WAIT
        return refused if call is None else Reading(cursor.at, [call])

    def _read_call(self, cursor: _Cursor) -> dict[str, Any] | None:
        if cursor.take(self.section, self.call_begin) == self.section and (
            cursor.take(self.call_begin) is None
        ):
            raise _Unreadable
        name = cursor.take_until(self.call_header_end, _MAX_HEADER).strip()
        if "<" in name or "\n" in name:
            raise _Unreadable
        arguments: dict[str, Any] = {}
        while (tag := cursor.take(self.key_begin, self.call_end)) == self.key_begin:
            header = self.key_pattern.fullmatch(cursor.take_until(">", _MAX_HEADER))
            if header is None:
                raise _Unreadable
            value = self._read_value(cursor)
            key = header.group("key").strip()
            is_text = header.groupdict().get("is_text")
            arguments[key] = value if is_text == "true" else self.types.convert(name, key, value)
        if tag is None:
            raise _Unreadable
        return build_call(name, arguments)

    def _read_value(self, cursor: _Cursor) -> str:
        value = cursor.take_value(self.value_end, (self.key_begin, self.call_end), self._other_call)
        return value.removeprefix("\n").removesuffix("\n") if self.has_lines else value


@dataclass(frozen=True, slots=True)
class GlmCalls:
    """GLM's calls: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>``..."""

    types: ArgumentTypes
    starts: tuple[str, ...] = ("<tool_call>",)
    closers: tuple[str, ...] = ()
    only_first: bool = False

    def read(self, text: str, at_end: bool) -> Reading:
        """The call that ``text`` begins with."""
        refused = Reading(len(self.starts[0]))
        cursor = _Cursor(text, len(self.starts[0]))
        try:
            call = self._read_call(cursor)
        except _Unreadable:
            return refused
        except _Unfinished:
            return refused if at_end else WAIT
        return refused if call is None else Reading(cursor.at, [call])

    def _read_call(self, cursor: _Cursor) -> dict[str, Any] | None:
        begin = cursor.at
        cursor.take_until("<", _MAX_HEADER)
        cursor.at -= 1
        name = cursor.text[begin : cursor.at].strip()
        if not name or any(c.isspace() or c in "{[" for c in name):
            raise _Unreadable
        arguments = {}
        while (tag := cursor.take("<arg_key>", "</tool_call>")) == "<arg_key>":
            key = cursor.take_until("</arg_key>", _MAX_HEADER).strip()
            if "<" in key or cursor.take("<arg_value>") is None:
                raise _Unreadable
            value = cursor.take_value("</arg_value>", ("<arg_key>", "</tool_call>"), _GLM_CALL)
            arguments[key] = self.types.convert(name, key, value)
        if tag is None:
            raise _Unreadable
        return build_call(name, arguments)
