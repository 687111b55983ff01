"""Reads replies by the response template that comes with a tokenizer, through transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl_cli.tracking.tool_calls import ParsedText, build_call


class ResponseTemplateParser:
    """transformers' ``ResponseParser``, which raises on what it cannot read, made to go on.

    It is fed character by character, so that nothing depends on the pieces, and so that the
    text of a region that it cannot read is known: that text becomes content.

    Args:
        tokenizer: with a ``response_template``.
        prompt: the last part of the prompt's text, where a thought may have been opened.
        tools: those that were offered; none: calls stay text.
    """

    def __init__(self, tokenizer: Any, prompt: str, tools: Sequence[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._pending = ""
        """Text that stands for nothing yet: marks, and what is inside a call."""
        self._parser = self._open(prompt)

    def feed(self, text: str) -> ParsedText:
        """What is certain after ``text``."""
        parsed = ParsedText()
        for character in text:
            self._pending += character
            try:
                events = self._parser.feed(character)
            except Exception:  # whatever a template's parsers raise
                self._give_up(parsed)
                continue
            self._take(parsed, events)
        return parsed

    def finish(self) -> ParsedText:
        """The rest, when no more text will come."""
        parsed = ParsedText()
        try:
            _, events = self._parser.finalize()
        except Exception:  # an unfinished call, or a field that is missing
            self._give_up(parsed)
            return parsed
        self._take(parsed, events)
        return parsed

    def _open(self, prompt: str) -> Any:
        return self._tokenizer.get_response_parser(prefix=prompt, tools=self._tools or None)

    def _give_up(self, parsed: ParsedText) -> None:
        parsed.content += self._pending
        self._pending = ""
        self._parser = self._open("")

    def _take(self, parsed: ParsedText, events: Sequence[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] == "tool_calls":
                if event["type"] == "region_close":
                    self._take_calls(parsed, event["value"])
            elif event["type"] == "region_chunk":
                text = event["text"]
                if event["field"] == "thinking":
                    parsed.reasoning += text
                else:
                    parsed.content += text
                # Marks before the text are gone, what is held back after it is not.
                _, _, self._pending = self._pending.rpartition(text)
        if events and events[-1]["type"] == "region_close":
            self._pending = ""

    def _take_calls(self, parsed: ParsedText, value: Any) -> None:
        found = value if isinstance(value, list) else [value]
        functions = [item.get("function") for item in found if isinstance(item, dict)]
        calls = [
            build_call(function.get("name"), function.get("arguments"))
            for function in functions
            if isinstance(function, dict)
        ]
        valid = [call for call in calls if call is not None]
        if self._tools and valid and len(valid) == len(found):
            parsed.tool_calls.extend(valid)
        else:
            parsed.content += self._pending
