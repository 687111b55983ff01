"""The reader of calls that are written as Python: ``[f(a=1), g(b="x")]``."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_cli.tracking.parsers.literals import read_python_calls
from agentrl_cli.tracking.parsers.scanning import WAIT, Reading
from agentrl_cli.tracking.tool_calls import build_call

#: A list of calls that does not end after so many closing brackets is none: each is tried.
_MAX_ATTEMPTS = 200


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
        at = text.find("]", begin)
        for _ in range(_MAX_ATTEMPTS):
            if at < 0:
                return refused if at_end else WAIT
            reading = _build(text[begin : at + 1], at + 1)
            if reading is not None:
                return reading
            at = text.find("]", at + 1)
        return refused

    def _read_lines(self, text: str, begin: int, at_end: bool) -> Reading:
        end = text.find(self.end, begin)
        if end < 0:
            if not at_end:
                return WAIT
            end = len(text)
        lines = [line for line in text[begin:end].splitlines() if line.strip()]
        length = min(len(text), end + len(self.end))
        return _build(f"[{','.join(lines)}]", length) or Reading(begin)


def _build(text: str, length: int) -> Reading | None:
    calls = [build_call(name, arguments) for name, arguments in read_python_calls(text) or ()]
    built = [call for call in calls if call is not None]
    return Reading(length, built) if built and len(built) == len(calls) else None
