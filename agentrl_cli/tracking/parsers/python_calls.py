"""The reader of calls that are written as Python: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl_cli.tracking.parsers.literals import read_python_calls
from agentrl_cli.tracking.parsers.scanning import WAIT, Reading
from agentrl_cli.tracking.tool_calls import build_call

_STRINGS = r""""{3}(?:[^\\]|\\.)*?"{3}|'{3}(?:[^\\]|\\.)*?'{3}|"{3}|'{3}"""
_SHORT_STRINGS = r""""[^"\\]*+(?:\\.[^"\\]*+)*+"|'[^'\\]*+(?:\\.[^'\\]*+)*+'|["']"""
#: Strings that do not end.
_OPEN_STRINGS = frozenset(("'", '"', "'''", '"""'))


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A list of calls, between two marks or, where there are none, at a reply's beginning.

    Args:
        start: the mark before it; empty: the list's own bracket.
        end: the mark after it.
        is_listed: False: the calls stand on lines of their own, without brackets.
    """

    start: str = ""
    end: str = ""
    is_listed: bool = True

    @property
    def starts(self) -> tuple[str, ...]:
        """The mark, or the bracket."""
        return (self.start or "[",)

    @property
    def closers(self) -> tuple[str, ...]:
        """The mark that follows a list."""
        return (self.end,) if self.end and self.is_listed else ()

    @property
    def only_first(self) -> bool:
        """A bracket in the midst of text begins no list of calls."""
        return not self.start

    def read(self, text: str, at_end: bool) -> Reading:
        """The calls that ``text`` begins with."""
        begin = len(self.start)
        refused = Reading(len(self.starts[0]))
        if not self.is_listed:
            return self._read_lines(text, begin, at_end)
        listed = text[begin:].lstrip()
        inside = listed[1:].lstrip()
        if listed[:1] not in ("", "[") or (
            inside and not (inside[0].isalpha() or inside[0] == "_")
        ):
            return refused
        end = _find_end(text, begin, self.start)
        if end is None:
            return refused if at_end else WAIT
        return _build(text[begin:end], end) or refused

    def _read_lines(self, text: str, begin: int, at_end: bool) -> Reading:
        mark = _find_mark(text, begin, (self.start, self.end))
        if mark is None and not at_end:
            return WAIT
        if mark is not None and mark.group() == self.start:
            return Reading(begin)
        end, length = mark.span() if mark is not None else (len(text), len(text))
        lines = [line for line in text[begin:end].splitlines() if line.strip()]
        return _build(f"[{','.join(lines)}]", length) or Reading(begin)


def _find_end(text: str, begin: int, start: str) -> int | None:
    """Where the list ends: with its bracket, or where the mark of another one stands; None: it
    has no end yet."""
    depth = 0
    for part in _list_parts(text, begin, (start,) if start else ()):
        if part.group() == start:
            return part.start()
        depth += 1 if part.group() in "([{" else -1
        if depth == 0:
            return part.end()
    return None


def _find_mark(text: str, begin: int, marks: tuple[str, ...]) -> re.Match[str] | None:
    """The first of ``marks`` that stands in no string."""
    return next((p for p in _list_parts(text, begin, marks) if p.group() in marks), None)


def _list_parts(text: str, begin: int, marks: tuple[str, ...]) -> Iterator[re.Match[str]]:
    """Marks and brackets outside of strings, up to a string that does not end."""
    for part in _compile_parts(marks).finditer(text, begin):
        found = part.group()
        if found in _OPEN_STRINGS:
            return
        if found[0] not in "'\"":
            yield part


@functools.cache
def _compile_parts(marks: tuple[str, ...]) -> re.Pattern[str]:
    escaped = [re.escape(mark) for mark in marks]
    return re.compile("|".join((*escaped, _STRINGS, _SHORT_STRINGS, r"[][(){}]")), re.DOTALL)


def _build(text: str, length: int) -> Reading | None:
    calls = [build_call(name, arguments) for name, arguments in read_python_calls(text) or ()]
    built = [call for call in calls if call is not None]
    return Reading(length, built) if built and len(built) == len(calls) else None
