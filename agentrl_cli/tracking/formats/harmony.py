"""The format of gpt-oss: messages on channels, each with a header.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>commentary
    to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Reasoning, calls and the answer are messages of one grammar, so one parser reads them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl_cli.tracking.formats.call_scanner import ParsedText, build_call, length_of_partial

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", _START)
#: All that may end the text of a message: a model may forget the end before a new header.
_BODY_MARKS = (*_ENDS, _CHANNEL)
_BODY_END = re.compile("|".join(re.escape(mark) for mark in _BODY_MARKS))
SPECIAL_TEXTS = (*_BODY_MARKS, _MESSAGE, "<|constrain|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
#: A header is not longer: what is, is text.
_MAX_HEADER = 400


class HarmonyParser:
    """Turns text, fed in any pieces, into reasoning, content and tool calls.

    Text that is no message of the format is content. A call's text is held back until it
    ends; one that is malformed stays in the content.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._reads_calls = bool(tools)
        self._buffer = ""
        self._header: str | None = ""
        """What of a header was read; None: the text of a message follows."""
        self._kind = "content"
        self._recipient = ""
        self._body = ""
        self._num_messages = {"content": 0, "reasoning": 0}
        self._has_text = False

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        self._buffer += text
        return self._advance(at_end=False)

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = self._advance(at_end=True)
        if self._body.strip():
            self._end_message(parsed)
        return parsed

    def _advance(self, at_end: bool) -> ParsedText:
        parsed = ParsedText()
        while self._buffer:
            read = self._read_header if self._header is not None else self._read_body
            if not read(parsed, at_end):
                break
        return parsed

    def _read_header(self, parsed: ParsedText, at_end: bool) -> bool:
        """Reads up to the message's text; False: more is needed."""
        head = self._buffer[: _MAX_HEADER + len(_MESSAGE)]
        rest = head.lstrip()
        begins = (_START, _CHANNEL, _MESSAGE, "to=", "assistant")
        if not any(rest.startswith(begin) for begin in begins):
            if any(begin.startswith(rest) for begin in begins) and not at_end:
                return False
            self._open_message("content", "")
            return True
        end = head.find(_MESSAGE)
        if end < 0:
            if not at_end and head == self._buffer:
                return False
            self._open_message("content", "")
            if rest.startswith((_START, _CHANNEL)):
                # Its first mark would end the text at once.
                mark = _START if rest.startswith(_START) else _CHANNEL
                length = len(head) - len(rest) + len(mark)
                self._add_text(parsed, self._buffer[:length])
                self._buffer = self._buffer[length:]
            return True
        header, self._buffer = self._buffer[:end], self._buffer[end + len(_MESSAGE) :]
        header = header.rpartition(_START)[2]
        channel = _CHANNEL_NAME.search(header)
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._reads_calls:
            self._open_message("call", recipient.group(1))
        elif channel is not None and channel.group(1) == "analysis":
            self._open_message("reasoning", "")
        else:
            self._open_message("content", "")
        return True

    def _read_body(self, parsed: ParsedText, at_end: bool) -> bool:
        found = _BODY_END.search(self._buffer)
        if found is not None:
            self._add_text(parsed, self._buffer[: found.start()])
            self._end_message(parsed)
            # A mark that begins a header is part of it.
            is_header = found.group() in (_START, _CHANNEL)
            self._buffer = self._buffer[found.start() if is_header else found.end() :]
            return True
        held = 0 if at_end else max(length_of_partial(self._buffer, m) for m in _BODY_MARKS)
        length = len(self._buffer) - held
        self._add_text(parsed, self._buffer[:length])
        self._buffer = self._buffer[length:]
        return False

    def _open_message(self, kind: str, recipient: str) -> None:
        self._header = None
        self._kind, self._recipient, self._body, self._has_text = kind, recipient, "", False

    def _add_text(self, parsed: ParsedText, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._body += text
            return
        # Messages of one kind are separated by a line break.
        separator = "\n" if not self._has_text and self._num_messages[self._kind] else ""
        self._num_messages[self._kind] += not self._has_text
        self._has_text = True
        if self._kind == "reasoning":
            parsed.reasoning += separator + text
        else:
            parsed.content += separator + text

    def _end_message(self, parsed: ParsedText) -> None:
        if self._header is None and self._kind == "call":
            call = build_call(self._recipient, self._body.strip() or "{}")
            if call is not None:
                parsed.tool_calls.append(call)
            else:
                parsed.has_malformed_call = True
                body, self._kind = self._body, "content"
                self._add_text(parsed, body)
        self._header = ""
