"""Finds calls in text that comes in pieces; the formats say only how one call is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_cli.tracking.tool_calls import ParsedText

#: What every format ends a call, or a part of one, with.
_ENDING_CHARACTERS = frozenset("}])>|")
#: So many characters are looked at again with every piece, to find early that they are no call.
_SHORT = 64
#: A call that is longer than the first is read again when it has grown by one part in the
#: second: every attempt begins at the call's beginning, and their sum should not be its square.
_LONG, _GROWTH = 1024, 16


@dataclass(slots=True)
class Reading:
    """What stands at the beginning of a text.

    No length: that is not to be known before more text comes. No calls: the characters are
    plain text.
    """

    length: int = 0
    """Characters that are read."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    """What of them is no call but stays in the content, beside calls."""


#: Not to be known before more text comes.
WAIT = Reading()


class CallReader(Protocol):
    """How one call, or one list of calls, is read."""

    @property
    def starts(self) -> Sequence[str]:
        """Texts that a call may begin with."""
        ...

    @property
    def closers(self) -> Sequence[str]:
        """Texts that may follow calls and belong to them: the end of a section."""
        ...

    @property
    def only_first(self) -> bool:
        """True: after other text nothing is a call."""
        ...

    def read(self, text: str, at_end: bool) -> Reading:
        """What ``text``, which begins with one of ``starts``, begins with.

        What is known stays so whatever comes after; only at the end, when nothing more comes,
        may an unfinished call be one or not.
        """
        ...


class CallScanner:
    """Turns text, fed in any pieces, into content and tool calls.

    The result does not depend on how the text was cut. Text that may be the beginning of a
    call is held back until it is known; white space at the beginning and after a call until
    text follows it, so that a reply of calls alone has no content.
    """

    def __init__(self, reader: CallReader) -> None:
        self._reader = reader
        self._starts = re.compile(_match_any(reader.starts))
        self._closers = re.compile(rf"(?:\s*(?:{_match_any(reader.closers)}))+")
        self._buffer = ""
        self._leading_space: str | None = ""
        self._num_calls = 0
        self._after_call = False
        self._num_waited = 0
        """Characters that were not enough to know what they are; 0: none wait."""

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        self._buffer += text
        if self._num_waited and not self._is_worth_reading(text):
            return ParsedText()
        return self._advance(at_end=False)

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = self._advance(at_end=True)
        if self._leading_space and not self._num_calls:
            parsed.content = self._leading_space + parsed.content
            self._leading_space = None
        return parsed

    def _is_worth_reading(self, text: str) -> bool:
        """Whether ``text`` may have ended the call that waits; if it did, a later text or the end
        finds it as well."""
        num_known = self._num_waited
        if num_known > _LONG:
            return len(self._buffer) - num_known > num_known // _GROWTH
        return len(self._buffer) <= _SHORT or not _ENDING_CHARACTERS.isdisjoint(text)

    def _advance(self, at_end: bool) -> ParsedText:
        parsed = ParsedText()
        self._num_waited = 0
        while self._buffer:
            if self._after_call and not self._pass_closers(at_end):
                break
            length, reading = self._find_calls(at_end)
            self._emit(parsed, length)
            if reading is None:
                break
            if reading is WAIT:
                self._num_waited = len(self._buffer)
                break
            self._take(parsed, reading)
        return parsed

    def _find_calls(self, at_end: bool) -> tuple[int, Reading | None]:
        """How much plain text comes first, and what was read after it; None: nothing yet."""
        at = 0
        while (start := self._find_start(at)) >= 0:
            # The first characters mostly tell what is no call: the rest is not copied for it.
            reading = self._reader.read(self._buffer[start : start + _SHORT], False)
            if not reading.length:
                reading = self._reader.read(self._buffer[start:], at_end)
            if reading.calls:
                return start, reading
            if not reading.length and not at_end:
                return start, WAIT
            at = start + max(1, reading.length)
        return len(self._buffer) - (0 if at_end else self._count_held(at)), None

    def _take(self, parsed: ParsedText, reading: Reading) -> None:
        self._num_calls += len(reading.calls)
        parsed.tool_calls.extend(reading.calls)
        # White space between calls, and after the last, is no text either.
        self._leading_space = ""
        self._buffer = reading.text + self._buffer[reading.length :]
        self._emit(parsed, len(reading.text))
        self._after_call = bool(self._reader.closers)

    def _pass_closers(self, at_end: bool) -> bool:
        """Drops what ends a section of calls; False: more text is needed to know."""
        passed = self._closers.match(self._buffer)
        self._buffer = self._buffer[passed.end() if passed is not None else 0 :]
        rest = self._buffer.lstrip()
        if any(closer.startswith(rest) for closer in self._reader.closers):
            if at_end:
                self._buffer = ""
            return at_end
        starts = self._reader.starts
        if any(rest.startswith(start) for start in starts):
            self._buffer = rest
        elif not at_end and any(start.startswith(rest) for start in starts):
            return False
        self._after_call = False
        return True

    def _find_start(self, at: int) -> int:
        """Where the next call may begin, from ``at`` on; -1: nowhere."""
        if self._reader.only_first and self._leading_space is None:
            return -1
        found = self._starts.search(self._buffer, at)
        if found is None or (self._reader.only_first and self._buffer[: found.start()].strip()):
            return -1
        return found.start()

    def _count_held(self, at: int) -> int:
        """How many last characters, from ``at`` on, may be the beginning of a call."""
        rest = self._buffer[at:]
        if self._reader.only_first:
            begun = self._buffer.lstrip()
            may_begin = any(start.startswith(begun) for start in self._reader.starts)
            return len(begun) if self._leading_space is not None and may_begin else 0
        return max(length_of_partial(rest, start) for start in self._reader.starts)

    def _emit(self, parsed: ParsedText, length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._leading_space is not None:
            if not text.strip():
                self._leading_space += text
                return
            text, self._leading_space = self._leading_space + text, None
        parsed.content += text


def _match_any(texts: Sequence[str]) -> str:
    return "|".join(re.escape(text) for text in texts)


def length_of_partial(text: str, tag: str) -> int:
    """How many last characters of ``text`` may be the beginning of ``tag``."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


def match_parts(
    text: str, at: int, parts: Sequence[str], *, at_end: bool, may_stop: bool = False
) -> int | None:
    """Where ``parts``, white space between them, end in ``text`` from ``at`` on.

    -1: more text is needed to know; None: they do not stand there. With ``may_stop``, text
    that ends within them is complete at the end.
    """
    for part in parts:
        while at < len(text) and text[at].isspace():
            at += 1
        if text.startswith(part, at):
            at += len(part)
        elif part.startswith(text[at:]):
            if at_end:
                return len(text) if may_stop else None
            return -1
        else:
            return None
    return at
