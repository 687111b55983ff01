"""Sampled tokens to the text and tool calls of a reply, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.tool_calls import HermesParser, ParsedText, parse_tool_calls


class ReplyReader:
    """Reads one reply; the result does not depend on the pieces in which it came.

    Args:
        template: whose tokenizer decodes.
        stop: texts that end the reply and are not part of it.
        parse_tools: False leaves text that looks like a tool call in the content.
    """

    def __init__(self, template: ChatTemplate, stop: Sequence[str], parse_tools: bool) -> None:
        self._tokenizer = template.tokenizer
        self._stop = tuple(stop)
        self._parser = HermesParser() if parse_tools else None
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self._stopped = False

    def feed(self, completion_ids: Sequence[int]) -> ParsedText:
        """What further tokens add."""
        backend = self._tokenizer.backend_tokenizer
        pieces = (self._decoder.step(backend, token_id) for token_id in completion_ids)
        return self._feed_text("".join(piece for piece in pieces if piece))

    def finish(self) -> ParsedText:
        """What was held back, when no more tokens will come."""
        text, self._held = ("" if self._stopped else self._held), ""
        if self._parser is None:
            return ParsedText(text)
        return self._parser.read_to_end(text)

    def _feed_text(self, text: str) -> ParsedText:
        text = self._pass_before_stop(text)
        return self._parser.feed(text) if self._parser is not None else ParsedText(text)

    def _pass_before_stop(self, text: str) -> str:
        """The text that is certain not to belong to a stop text."""
        if self._stopped:
            return ""
        text, self._held = self._held + text, ""
        if not self._stop:
            return text
        starts = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if starts:
            self._stopped = True
            return text[: min(starts)]
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                self._held = text[-length:]
                return text[:-length]
        return text


def read_reply(
    template: ChatTemplate, generation: Generation, stop: Sequence[str], parse_tools: bool
) -> ParsedText:
    """Content and tool calls of a complete generation."""
    text = template.decode_reply(generation.completion_ids)
    starts = [at for at in (text.find(s) for s in stop) if at >= 0]
    if starts:
        text = text[: min(starts)]
    return parse_tool_calls(text) if parse_tools else ParsedText(text)
