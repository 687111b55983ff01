"""Sampled tokens to the text, thoughts and tool calls of a reply, whole or piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from agentrl_cli.log import get_logger
from agentrl_cli.tracking.parsers.formats import ReplyContext, TextParser
from agentrl_cli.tracking.parsers.thinking import ThinkingParser
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.tool_calls import ParsedText

_log = get_logger(__name__)
#: Enough of a prompt's end to see whether it opens a thought.
PROMPT_END_TOKENS = 64


class ReplyReader:
    """Reads one reply; the result does not depend on the pieces in which it came.

    Args:
        template: whose tokenizer decodes, and whose formats are read.
        stop: texts that end the reply and are not part of it.
        parse_tools: False leaves text that looks like a tool call in the content.
        tools: those that were offered.
        prompt_ids: what the reply continues: it may end inside a thought.
    """

    def __init__(
        self,
        template: ChatTemplate,
        stop: Sequence[str],
        parse_tools: bool,
        *,
        tools: Sequence[dict[str, Any]] = (),
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._template = template
        self._stop = tuple(stop)
        # Whether the prompt opened a thought is nothing to formats that know of none.
        reads_thoughts = template.formats.reads_thoughts
        prompt_end = template.decode_all(prompt_ids[-PROMPT_END_TOKENS:]) if reads_thoughts else ""
        context = ReplyContext(tools=tools if parse_tools else (), prompt_end=prompt_end)
        self._parser = _build_parser(template, context, parse_tools)
        self._decoder: DecodeStream | None = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._num_decoded = 0
        self._held = ""
        self._stopped = False

    def feed(self, completion_ids: Sequence[int]) -> ParsedText:
        """What further tokens add."""
        shown = self._template.select_shown(completion_ids)
        self._ids += shown
        text = "".join(self._decode(token_id) for token_id in shown)
        self._num_decoded += len(text)
        return self._feed_text(text)

    def finish(self) -> ParsedText:
        """What was held back, when no more tokens will come."""
        # A character that was not completed is part of the whole text alone.
        whole = self._template.decode_all(self._ids)
        parsed = self._feed_text(whole[self._num_decoded :])
        parsed.add(self.finish_text())
        return parsed

    def read(self, completion_ids: Sequence[int]) -> ParsedText:
        """All of a reply at once."""
        if self._template.decodes_in_runs:
            parsed = self.feed(completion_ids)
            parsed.add(self.finish())
            return parsed
        shown = self._template.select_shown(completion_ids)
        parsed = self._feed_text(self._template.decode_all(shown))
        parsed.add(self.finish_text())
        return parsed

    def finish_text(self) -> ParsedText:
        """What parsers hold back, and what might have been a stop text."""
        text, self._held = ("" if self._stopped else self._held), ""
        if self._parser is None:
            return ParsedText(text)
        parsed = self._parser.feed(text)
        parsed.add(self._parser.finish())
        return parsed

    def _decode(self, token_id: int) -> str:
        if self._decoder is None:
            return ""
        try:
            return self._decoder.step(self._template.tokenizer.backend_tokenizer, token_id) or ""
        except Exception as error:  # of the tokenizers library, which has no class of its own
            _log.debug("the reply is decoded at its end: %s", error)
            self._decoder = None
            return ""

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


def _build_parser(
    template: ChatTemplate, context: ReplyContext, parse_tools: bool
) -> TextParser | None:
    formats = template.formats
    calls = formats.tool_calls
    parser = None
    if calls is not None and (parse_tools or calls.reads_thoughts):
        parser = calls.build_parser(context)
    if formats.reasoning is None:
        return parser
    is_inside = formats.reasoning.is_inside(context.prompt_end)
    return ThinkingParser(formats.reasoning.syntax, is_inside=is_inside, answer=parser)
