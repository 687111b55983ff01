"""Parts thoughts from the answer, in text that comes in pieces."""

from __future__ import annotations

from agentrl_cli.tracking.parsers.formats import TextParser
from agentrl_cli.tracking.parsers.scanning import length_of_partial
from agentrl_cli.tracking.parsers.syntax import ThinkingSyntax
from agentrl_cli.tracking.tool_calls import ParsedText


class ThinkingParser:
    """A thought at the beginning of a reply, and the answer after it.

    White space around the thought belongs to neither. A thought that does not end is all
    the reply; what looks like a call inside it is part of it.

    Args:
        syntax: what stands around a thought.
        is_inside: True: the prompt ends inside a thought.
        answer: reads what follows; None: it is plain text.
    """

    def __init__(
        self, syntax: ThinkingSyntax, *, is_inside: bool, answer: TextParser | None
    ) -> None:
        self._syntax = syntax
        self._answer = answer
        self._buffer = ""
        self._held_space = ""
        self._state = "begin"
        self._is_inside = is_inside
        self._has_thought = False

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        self._buffer += text
        return self._advance(at_end=False)

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = self._advance(at_end=True)
        if self._answer is not None:
            parsed.add(self._answer.finish())
        return parsed

    def _advance(self, at_end: bool) -> ParsedText:
        parsed = ParsedText()
        if self._state == "begin":
            self._begin(at_end)
        if self._state == "thought":
            self._think(parsed, at_end)
        if self._state == "between":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "answer"
        if self._state == "answer":
            text, self._buffer = self._buffer, ""
            if self._answer is None:
                parsed.content += text
            else:
                parsed.add(self._answer.feed(text))
        return parsed

    def _begin(self, at_end: bool) -> None:
        """Passes the tag that a reply may begin with, also where the prompt has it already."""
        rest = self._buffer.lstrip()
        if rest.startswith(self._syntax.begin):
            self._buffer = rest[len(self._syntax.begin) :]
            self._state = "thought"
        elif at_end or not self._syntax.begin.startswith(rest):
            self._state = "thought" if self._is_inside else "answer"

    def _think(self, parsed: ParsedText, at_end: bool) -> None:
        end = self._buffer.find(self._syntax.end)
        if end >= 0:
            self._emit_thought(parsed, self._buffer[:end])
            self._buffer = self._buffer[end + len(self._syntax.end) :]
            self._state = "between"
            return
        held = 0 if at_end else length_of_partial(self._buffer, self._syntax.end)
        length = len(self._buffer) - held
        self._emit_thought(parsed, self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _emit_thought(self, parsed: ParsedText, text: str) -> None:
        text = self._held_space + text
        if not self._has_thought:
            text = text.lstrip()
        kept = text.rstrip()
        self._held_space = text[len(kept) :]
        self._has_thought = self._has_thought or bool(kept)
        parsed.reasoning += kept
