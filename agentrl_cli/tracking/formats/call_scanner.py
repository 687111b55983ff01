"""Finds calls in text that comes in pieces; the formats say only how one call is read."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Every format ends a call, or a part of one, with one of these.
_ENDING_CHARACTERS = frozenset("}])>|")
#: So many characters are looked at again with every piece, to find early that they are no call.
_SHORT = 64
#: A call that is longer than the first is read again when it has grown by one part in the
#: second: every attempt begins at the call's beginning, and their sum should not be its square.
_LONG, _GROWTH = 1024, 16


@dataclass(slots=True)
class Reading:
    """What a text begins with.

    No length: more text is needed to know. No calls: the characters are plain text.
    """

    length: int = 0
    """Characters that are read."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    """What of them is no call but stays in the content, beside calls."""
    is_malformed: bool = False
    """True: among them is what begins as a call and is none."""


#: More text is needed to know.
WAIT = Reading()

#: How calls begin that no mark precedes, where an answer might begin with the same characters.
_BARE_CALL = re.compile(r'\w*\[?\{[^{}]*"(?:parameters|arguments)"\s*:|\[\s*[\w.]+\(')


class Unreadable(Exception):  # noqa: N818 - never leaves this room
    """The text is no call, whatever follows."""


class Unfinished(Exception):  # noqa: N818
    """More text is needed to know."""


@dataclass(slots=True)
class Cursor:
    """A place in a text that may go on, unless ``at_end``."""

    text: str
    at_end: bool
    at: int = 0

    def skip_space(self) -> None:
        """Moves to the next character that is no white space."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def peek(self) -> str:
        """The next character after white space; empty: there is none yet."""
        self.skip_space()
        return self.text[self.at : self.at + 1]

    def is_partial(self, *tags: str) -> bool:
        """Whether the rest of the text may be the beginning of one of ``tags``."""
        rest = self.text[self.at :]
        return any(tag.startswith(rest) for tag in tags)

    def take(self, *tags: str) -> str | None:
        """Passes the tag that follows, after white space; None: other text does."""
        self.skip_space()
        for tag in tags:
            if self.text.startswith(tag, self.at):
                self.at += len(tag)
                return tag
        if self.is_partial(*tags):
            raise Unfinished
        return None

    def expect(self, *tags: str) -> None:
        """Passes all ``tags`` in their order, white space between them."""
        for tag in tags:
            if self.take(tag) is None:
                raise Unreadable

    def close(self, *tags: str) -> None:
        """As :meth:`expect`, where the end of all text, not inside of a tag, ends a call too."""
        try:
            self.expect(*tags)
        except Unfinished:
            if not self.at_end or self.peek():
                raise

    def match(self, pattern: re.Pattern[str]) -> str:
        """The text after white space that ``pattern`` matches."""
        self.skip_space()
        found = pattern.match(self.text, self.at)
        if found is None:
            raise Unfinished if self.at == len(self.text) else Unreadable
        self.at = found.end()
        return found.group()

    def take_json(self, opening: str = "{") -> Any:
        """The JSON data that follows, if it begins with ``opening``."""
        if self.peek() not in ("", opening):
            raise Unreadable
        try:
            data, self.at = decode_json(self.text, self.at)
        except (ValueError, RecursionError):
            raise Unfinished from None
        return data

    def take_until(self, tag: str, limit: int | None = None) -> str:
        """The text before ``tag``, which is passed too."""
        end = self.text.find(tag, self.at)
        length = (len(self.text) if end < 0 else end) - self.at
        if limit is not None and length > limit:
            raise Unreadable
        if end < 0:
            raise Unfinished
        found = self.text[self.at : end]
        self.at = end + len(tag)
        return found

    def end_call(self, call: dict[str, Any] | None) -> Reading:
        """What was read up to here is ``call``; None: it is none."""
        if call is None:
            raise Unreadable
        return Reading(self.at, [call])


class CallReader(ABC):
    """How one call, or one list of calls, is read."""

    starts: tuple[str, ...]
    """Texts that a call may begin with."""
    closers: tuple[str, ...] = ()
    """Texts that may follow calls and belong to them: the end of a section."""
    first_starts: tuple[str, ...] = ()
    """Those of ``starts`` that begin no call after other text."""

    def read(self, text: str, at_end: bool) -> Reading:
        """What ``text``, which begins with one of ``starts``, begins with.

        What is known stays so whatever comes after; only at the end, when nothing more comes,
        may an unfinished call be one or not.
        """
        start = next(start for start in self.starts if text.startswith(start))
        # A word or a single bracket may begin anything.
        refused = Reading(len(start), is_malformed=len(start) > 1 and not start.isalpha())
        try:
            return self.read_calls(Cursor(text, at_end))
        except Unreadable:
            return refused
        except Unfinished:
            if not at_end:
                return WAIT
            refused.is_malformed |= _BARE_CALL.match(text) is not None
            return refused

    @abstractmethod
    def read_calls(self, cursor: Cursor) -> Reading:
        """What the cursor's text begins with. Raises where that is no call, or unfinished."""


class CallScanner:
    """Turns text, fed in any pieces, into content and tool calls.

    The result does not depend on how the text was cut. Text that may be the beginning of a
    call is held back until this is certain; white space at the beginning and after a call until
    text follows it, so that a reply of calls alone has no content.

    Reasoning that nobody has parted from the reply is content, and what looks like a call inside
    of it is none.

    Args:
        reader: of one call.
        prompt_end: the last part of the prompt's text, where reasoning may have begun.
    """

    def __init__(self, reader: CallReader, prompt_end: str = "") -> None:
        self._reader = reader
        self._later_starts = tuple(s for s in reader.starts if s not in reader.first_starts)
        self._places = _compile_texts(*REASONING_MARKS, *reader.starts)
        self._later_places = _compile_texts(*REASONING_MARKS, *self._later_starts)
        self._closers = re.compile(rf"(?:\s*{_compile_texts(*reader.closers).pattern})+")
        self._reasoning_end = find_open_reasoning(prompt_end)
        """What ends the reasoning at hand; empty: there is none."""
        self._buffer = ""
        self._leading_space: str | None = ""
        self._num_calls = 0
        self._after_call = self._has_malformed_call = False
        self._num_waited = 0
        """Characters that were too few to tell what they are; 0: nothing waits."""

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
            if self._reasoning_end:
                if not self._pass_reasoning(parsed, at_end):
                    break
                continue
            if self._after_call and not self._pass_closers(at_end):
                break
            length, reading = self._find_calls(at_end)
            self._emit(parsed, length)
            if reading is None:
                break
            if reading is WAIT:
                self._num_waited = len(self._buffer)
                break
            if reading.calls:
                self._take(parsed, reading)
        parsed.has_malformed_call = self._has_malformed_call
        return parsed

    def _find_calls(self, at_end: bool) -> tuple[int, Reading | None]:
        """How much plain text comes first, and what was read after it; None: nothing yet."""
        at = 0
        while (found := self._find_place(at)) is not None:
            start = found.start()
            if found.group() in REASONING_MARKS:
                self._reasoning_end = REASONING_MARKS[found.group()]
                return found.end(), Reading()
            # The first characters mostly tell what is no call: the rest is not copied for it.
            reading = self._reader.read(self._buffer[start : start + _SHORT], False)
            if not reading.length:
                reading = self._reader.read(self._buffer[start:], at_end)
            self._has_malformed_call |= reading.is_malformed
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
        starts = self._later_starts
        if any(rest.startswith(start) for start in starts):
            self._buffer = rest
        elif not at_end and any(start.startswith(rest) for start in starts):
            return False
        self._after_call = False
        return True

    def _pass_reasoning(self, parsed: ParsedText, at_end: bool) -> bool:
        """Emits reasoning up to its end; False: the end has not come."""
        end = self._buffer.find(self._reasoning_end)
        if end < 0:
            held = 0 if at_end else length_of_partial(self._buffer, self._reasoning_end)
            self._emit(parsed, len(self._buffer) - held)
            return False
        self._emit(parsed, end + len(self._reasoning_end))
        self._reasoning_end = ""
        return True

    def _find_place(self, at: int) -> re.Match[str] | None:
        """Where the next call or reasoning may begin, from ``at`` on."""
        if self._leading_space is not None:
            found = self._places.search(self._buffer, at)
            if found is None or not self._buffer[: found.start()].strip():
                return found
        return self._later_places.search(self._buffer, at)

    def _count_held(self, at: int) -> int:
        """How many last characters, from ``at`` on, may be the beginning of a call."""
        rest = self._buffer[at:]
        starts = self._reader.starts if self._leading_space is not None else self._later_starts
        return max(length_of_partial(rest, text) for text in (*starts, *REASONING_MARKS))

    def _emit(self, parsed: ParsedText, length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._leading_space is not None:
            if not text.strip():
                self._leading_space += text
                return
            text, self._leading_space = self._leading_space + text, None
        parsed.content += text


#: The marks of reasoning, by what begins it: whatever model writes them.
REASONING_MARKS: Mapping[str, str] = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
}


def find_open_reasoning(prompt_end: str) -> str:
    """The mark that ends the reasoning in which a prompt ends; empty: it ends in none."""
    end = prompt_end.rstrip()
    return next((REASONING_MARKS[mark] for mark in REASONING_MARKS if end.endswith(mark)), "")


def has_open_reasoning(text: str) -> bool:
    """Whether a text ends inside of reasoning."""
    return any(text.rfind(begin) > text.rfind(end) for begin, end in REASONING_MARKS.items())


def _compile_texts(*texts: str) -> re.Pattern[str]:
    return re.compile(f"(?:{'|'.join(map(re.escape, texts))})")


def length_of_partial(text: str, tag: str) -> int:
    """How many last characters of ``text`` may be the beginning of ``tag``."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


@dataclass(slots=True)
class ParsedText:
    """What a piece of text adds to a message: content, complete tool calls and reasoning."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""
    has_malformed_call: bool = False
    """True: some of the content begins as a tool call and cannot be read as one."""

    def add(self, other: ParsedText) -> None:
        """Takes in what came after."""
        self.content += other.content
        self.tool_calls.extend(other.tool_calls)
        self.reasoning += other.reasoning
        self.has_malformed_call |= other.has_malformed_call


def make_call_id() -> str:
    """An id for a call of a model that gives none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def build_call(name: Any, arguments: Any, call_id: str | None = None) -> dict[str, Any] | None:
    """The call in OpenAI's form, or None when these are no name and no arguments.

    Args:
        name: of the tool.
        arguments: an object, an object as JSON text, or None for no arguments.
        call_id: as the model wrote it; None: a new one.
    """
    if not isinstance(name, str) or not name or not _is_encodable(name):
        return None
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except (ValueError, RecursionError):
            return None
    text = _dump_arguments({} if arguments is None else arguments)
    if text is None:
        return None
    return {
        "id": call_id or make_call_id(),
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def load_json(text: str) -> Any:
    """The data of a JSON text.

    Raises:
        ValueError: it is not JSON; nor are NaN and infinity, which Python's json accepts.
        RecursionError: it is nested too deeply.
    """
    data, end = decode_json(text, 0)
    if text[end:].strip():
        raise ValueError("text follows the JSON")
    return data


def decode_json(text: str, begin: int) -> tuple[Any, int]:
    """The JSON data that stands at ``begin``, after white space, and where it ends.

    Raises as :func:`load_json`.
    """
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return _DECODER.raw_decode(text, begin)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


#: Not strict: models write line breaks into strings, which is meant and not ambiguous.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _dump_arguments(arguments: Any) -> str | None:
    """One JSON object as text that can be sent; None when there is no such text."""
    if not isinstance(arguments, dict):
        return None
    try:
        return make_encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return None


def make_encodable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs: JSON may have them, as escapes, but no
    tokenizer and no client takes them."""
    if _is_encodable(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
