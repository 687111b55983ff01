"""What a format of replies is, who reads it, and where reasoning ends and the answer begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agentrl_cli.tracking.formats.call_scanner import ParsedText, length_of_partial

#: How arguments are written, in the words of xgrammar's ``JSONSchemaFormat.style``.
ArgumentsStyle = Literal["json", "qwen_xml", "minimax_xml"]


class TextParser(Protocol):
    """Turns text, fed in any pieces, into content, calls and reasoning.

    It never raises, whatever the text, and what comes out does not depend on the pieces.
    """

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        ...

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyContext:
    """What a parser may have to know of the request whose reply it reads."""

    tools: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """Those that were offered."""
    prompt_end: str = ""
    """The last part of the prompt's text, special tokens included; empty where the reasoning that
    begins there is read by another parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The texts around the name and the arguments of a call.

    One reply's calls are ``section_begin``, the calls with ``separator`` between them,
    ``section_end``; a call is ``before_name``, its name, ``before_arguments``, its arguments,
    ``end``. Text may stand before the section.
    """

    before_name: str
    before_arguments: str
    end: str
    arguments_style: ArgumentsStyle = "json"
    section_begin: str = ""
    section_end: str = ""
    separator: str = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How a family of models writes tool calls."""

    name: str
    """What it is called here, and mostly in vLLM."""
    build_parser: Callable[[ReplyContext], TextParser]
    """A parser for one reply."""
    grammar: CallSyntax | str | None = None
    """What sampling is constrained to: the name under which xgrammar knows the format, or, where
    it does not, how a call is written; None: sampling cannot be constrained to this format."""
    special_texts: tuple[str, ...] | None = ()
    """Special tokens that mean something to the parser, others are left out of the text; None:
    all do."""
    end_of_call: str | None = None
    """The text that ends a call: where sampling stops when one call is wanted; None: a call has
    no end of its own."""
    reads_reasoning: bool = False
    """True: reasoning is part of this format, and its parser reads every reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its reasoning: the texts around it."""

    name: str
    begin: str = "<think>"
    end: str = "</think>"
    begins_inside: bool = False
    """True: a reply is reasoning from its first token, unless the prompt ended the reasoning."""

    def is_inside(self, prompt_end: str) -> bool:
        """Whether a reply to a prompt that ends so begins inside the reasoning."""
        # Reasoning of earlier turns may be shown too: what counts is what the prompt ends with.
        end = prompt_end.rstrip()
        if end.endswith(self.end):
            return False
        return end.endswith(self.begin) or self.begins_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormats:
    """How the model at hand writes; None: as plain text."""

    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is told apart from the answer."""
        return self.reasoning is not None or (
            self.tool_calls is not None and self.tool_calls.reads_reasoning
        )

    def describe(self) -> str:
        """Which formats they are, as a line."""
        calls = "nothing" if self.tool_calls is None else self.tool_calls.name
        if self.tool_calls is not None and self.tool_calls.reads_reasoning:
            reasoning = self.tool_calls.name
        else:
            reasoning = "nothing" if self.reasoning is None else self.reasoning.name
        return f"tool calls are read as {calls}, reasoning as {reasoning}"


class ReasoningParser:
    """Reasoning at the beginning of a reply, and the answer after it.

    White space around the reasoning belongs to neither. Reasoning that does not end is all of
    the reply; what looks like a call inside it is part of it.

    Args:
        reasoning: what stands around it.
        is_inside: True: the prompt ends inside the reasoning.
        answer: reads what follows; None: it is plain text.
    """

    def __init__(
        self, reasoning: ReasoningFormat, *, is_inside: bool, answer: TextParser | None
    ) -> None:
        self._begin, self._end = reasoning.begin, reasoning.end
        self._answer = answer
        self._buffer = ""
        self._held_space = ""
        self._state = "begin"
        self._is_inside = is_inside
        self._has_reasoning = False

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
            self._pass_begin(at_end)
        if self._state == "reasoning":
            self._read_reasoning(parsed, at_end)
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

    def _pass_begin(self, at_end: bool) -> None:
        """Passes the tag that a reply may begin with, also where the prompt has it already."""
        rest = self._buffer.lstrip()
        if rest.startswith(self._begin):
            self._buffer = rest[len(self._begin) :]
            self._state = "reasoning"
        elif at_end or not self._begin.startswith(rest):
            self._state = "reasoning" if self._is_inside else "answer"

    def _read_reasoning(self, parsed: ParsedText, at_end: bool) -> None:
        end = self._buffer.find(self._end)
        if end >= 0:
            self._emit_reasoning(parsed, self._buffer[:end])
            self._buffer = self._buffer[end + len(self._end) :]
            self._state = "between"
            return
        held = 0 if at_end else length_of_partial(self._buffer, self._end)
        length = len(self._buffer) - held
        self._emit_reasoning(parsed, self._buffer[:length])
        self._buffer = self._buffer[length:]

    def _emit_reasoning(self, parsed: ParsedText, text: str) -> None:
        text = self._held_space + text
        if not self._has_reasoning:
            text = text.lstrip()
        kept = text.rstrip()
        self._held_space = text[len(kept) :]
        self._has_reasoning = self._has_reasoning or bool(kept)
        parsed.reasoning += kept
