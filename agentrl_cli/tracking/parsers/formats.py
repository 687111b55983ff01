"""What a format is: who reads its text, and how it is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl_cli.tracking.parsers.syntax import CallSyntax, ThinkingSyntax
from agentrl_cli.tracking.tool_calls import ParsedText


class TextParser(Protocol):
    """Turns text, fed in any pieces, into content, calls and thoughts.

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
    """What a parser may have to know of the request it reads the reply of."""

    tools: Sequence[dict[str, Any]] = field(default_factory=tuple)
    """Those that were offered."""
    prompt_end: str = ""
    """The last part of the prompt's text, special tokens included; empty where no format reads
    thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """How a family of models writes tool calls."""

    name: str
    """What it is called here, and mostly in vLLM."""
    build_parser: Callable[[ReplyContext], TextParser]
    """A parser for one reply."""
    syntax: CallSyntax | None = None
    """How a call is written; None: sampling cannot be held to this format."""
    special_texts: tuple[str, ...] | None = ()
    """Special tokens that mean something to the parser, others are left out of the text; None:
    all do."""
    end_of_call: str | None = None
    """The text that ends a call: where sampling stops when one call is wanted; None: a call has
    no end of its own."""
    reads_thoughts: bool = False
    """True: thoughts are part of this format, and its parser reads every reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a family of models writes its thoughts."""

    name: str
    syntax: ThinkingSyntax
    begins_inside: bool = False
    """True: a reply is a thought from its first token, unless the prompt closed the thought."""

    def is_inside(self, prompt_end: str) -> bool:
        """Whether a reply to a prompt that ends so begins inside a thought."""
        # Thoughts of earlier turns may be shown too: what counts is what the prompt ends with.
        end = prompt_end.rstrip()
        if end.endswith(self.syntax.end):
            return False
        return end.endswith(self.syntax.begin) or self.begins_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormats:
    """How the model at hand writes; None: as plain text."""

    tool_calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def reads_thoughts(self) -> bool:
        """Whether thoughts are told apart from the answer."""
        return self.reasoning is not None or (
            self.tool_calls is not None and self.tool_calls.reads_thoughts
        )

    def describe(self) -> str:
        """Which formats they are, as a line."""
        calls = "nothing" if self.tool_calls is None else self.tool_calls.name
        if self.tool_calls is not None and self.tool_calls.reads_thoughts:
            thoughts = self.tool_calls.name
        else:
            thoughts = "nothing" if self.reasoning is None else self.reasoning.name
        return f"tool calls are read as {calls}, thoughts as {thoughts}"
