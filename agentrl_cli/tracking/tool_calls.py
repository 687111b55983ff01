"""Tool calls in the text of a model: the hermes format of Qwen and Nous models.

    <tool_call>
    {"name": "calculate", "arguments": {"expression": "2+2"}}
    </tool_call>

A malformed call never raises: its text stays in the content, and valid calls beside it
are kept.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.errors import UserInputError, format_nearest

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
#: The names under which users know this format from vLLM and SGLang.
PARSER_NAMES = ("hermes", "qwen", "qwen25")


def check_parser_name(name: str) -> None:
    """Refuses a ``tool_call_parser`` that does not exist.

    Raises:
        UserInputError: with the nearest name.
    """
    if name not in PARSER_NAMES:
        raise UserInputError(
            f"engine.tool_call_parser: {name!r} is not known; {format_nearest(name, PARSER_NAMES)}"
        )


@dataclass(slots=True)
class ParsedText:
    """What a piece of text adds to a message: content, complete tool calls, and thoughts."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""

    def add(self, other: ParsedText) -> None:
        """Takes in what came after."""
        self.content += other.content
        self.tool_calls.extend(other.tool_calls)
        self.reasoning += other.reasoning


class HermesParser:
    """Turns text, fed in any pieces, into content and tool calls.

    The result does not depend on how the text was cut into pieces. Text that may be
    the beginning of a call is held back until it is known; leading white space until
    something follows it, so that a reply of calls alone has no content.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._leading_space: str | None = ""
        self._num_calls = 0

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        self._buffer += text
        return self._advance(at_end=False)

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = self._advance(at_end=True)
        if self._leading_space and not self._num_calls:
            parsed.content = self._leading_space + parsed.content
            self._leading_space = None
        return parsed

    def read_to_end(self, text: str) -> ParsedText:
        """What the last piece of text adds."""
        parsed, rest = self.feed(text), self.finish()
        return ParsedText(parsed.content + rest.content, parsed.tool_calls + rest.tool_calls)

    def _advance(self, at_end: bool) -> ParsedText:
        parsed = ParsedText()
        while self._buffer:
            start = self._buffer.find(_OPEN)
            if start < 0:
                held = 0 if at_end else _length_of_partial(self._buffer, _OPEN)
                self._emit(parsed, len(self._buffer) - held)
                break
            self._emit(parsed, start)
            call, length = _read_call(self._buffer, at_end)
            if call is not None:
                self._num_calls += 1
                parsed.tool_calls.append(call)
                self._buffer = self._buffer[length:]
            elif length:
                self._emit(parsed, length)
            else:
                break
        return parsed

    def _emit(self, parsed: ParsedText, length: int) -> None:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        if self._leading_space is not None:
            text = self._leading_space + text
            self._leading_space = None if text.strip() else text
            if self._leading_space is not None:
                return
        parsed.content += text


def parse_tool_calls(text: str) -> ParsedText:
    """Content and tool calls of a complete text."""
    return HermesParser().read_to_end(text)


def _read_call(buffer: str, at_end: bool) -> tuple[dict[str, Any] | None, int]:
    """The call that ``buffer`` begins with, and the length of its text.

    ``(None, n)``: the first n characters are no call, but plain text.
    ``(None, 0)``: not to be known before more text comes.
    """
    begin = len(_OPEN)
    while begin < len(buffer) and buffer[begin].isspace():
        begin += 1
    try:
        data, end = _DECODER.raw_decode(buffer, begin)
    except (ValueError, RecursionError):
        return None, (len(_OPEN) if at_end else 0)
    rest = buffer[end:].lstrip()
    closed = rest.startswith(_CLOSE)
    if not closed and _CLOSE.startswith(rest) and not at_end:
        return None, 0
    call = _build_call(data)
    if call is None or not (closed or not rest or (at_end and _CLOSE.startswith(rest))):
        return None, len(_OPEN)
    return call, len(buffer) - len(rest) + (len(_CLOSE) if closed else len(rest))


def _build_call(data: Any) -> dict[str, Any] | None:
    """The call in OpenAI's form, or None when the JSON does not describe one."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not data["name"]:
        return None
    arguments = data.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {
            "name": data["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _length_of_partial(text: str, tag: str) -> int:
    """How many last characters of ``text`` may be the beginning of ``tag``."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0
