"""Sampled tokens as the text, reasoning and tool calls of a reply, and as APIs report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers.decoders import DecodeStream

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.log import get_logger
from agentrl_cli.records import Message
from agentrl_cli.tracking.formats.call_scanner import ParsedText
from agentrl_cli.tracking.formats.reply_formats import ReasoningParser, ReplyContext, TextParser
from agentrl_cli.tracking.template import ChatTemplate

_log = get_logger(__name__)
#: Enough of a prompt's end to see whether reasoning begins there.
PROMPT_END_TOKENS = 64


class ReplyReader:
    """Reads one reply; the result does not depend on the pieces in which it came.

    Args:
        template: whose tokenizer decodes, and whose formats are read.
        stop: texts that end the reply and are not part of it.
        parse_tools: False leaves text that looks like a tool call in the content.
        tools: those that were offered.
        prompt_ids: what the reply continues: it may end inside reasoning.
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
        # Formats without reasoning need no end of the prompt.
        reads_reasoning = template.formats.reads_reasoning
        prompt_end = template.decode_all(prompt_ids[-PROMPT_END_TOKENS:]) if reads_reasoning else ""
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
        # An incomplete character appears only when the whole text is decoded.
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
    if calls is not None and (parse_tools or calls.reads_reasoning):
        parser = calls.build_parser(context)
    if formats.reasoning is None:
        return parser
    is_inside = formats.reasoning.is_inside(context.prompt_end)
    return ReasoningParser(formats.reasoning, is_inside=is_inside, answer=parser)


def format_token_logprobs(template: ChatTemplate, generation: Generation) -> list[dict[str, Any]]:
    """One object for each sampled token, the end token included; nats.

    Both of OpenAI's APIs write them so.
    """
    # Empty unless they were asked for.
    top = generation.top_logprobs or ((),) * len(generation.completion_ids)
    return [
        {
            **_format_token(template, token_id, logprob),
            "top_logprobs": [_format_token(template, *other) for other in others],
        }
        for token_id, logprob, others in zip(
            generation.completion_ids, generation.rollout_logprobs, top, strict=True
        )
    ]


class TextLogprobs:
    """The logprobs of a reply's text alone: not of its reasoning, its calls and their markers.

    Args:
        template: whose tokens they are.
        reader: a new one of that reply.
    """

    def __init__(self, template: ChatTemplate, reader: ReplyReader) -> None:
        self._template = template
        self._reader = reader
        self._end_ids = frozenset(template.tokenizer.all_special_ids)
        self._held: list[dict[str, Any]] = []
        """Of tokens that are not known to be text yet."""

    def feed(self, generation: Generation) -> list[dict[str, Any]]:
        """Those of what further tokens add to the text."""
        logprobs = []
        reported = format_token_logprobs(self._template, generation)
        # One by one: a token counts as text if it yields text.
        for token_id, report in zip(generation.completion_ids, reported, strict=True):
            if token_id not in self._end_ids:
                self._held.append(report)
            logprobs += self._take(self._reader.feed((token_id,)))
        return logprobs

    def finish(self) -> list[dict[str, Any]]:
        """Those of text that was held back until the end."""
        return self._take(self._reader.finish())

    def _take(self, parsed: ParsedText) -> list[dict[str, Any]]:
        if not (parsed.content or parsed.reasoning or parsed.tool_calls):
            return []
        held, self._held = self._held, []
        num_bytes = len(parsed.content.encode())
        first = len(held)
        # What stands before the text is a marker, such as the end of the reasoning.
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(held[first]["bytes"])
        return held[first:]


def count_reasoning_tokens(
    template: ChatTemplate, generation: Generation, reply: Message | None
) -> int:
    """How many tokens were sampled until a reply's reasoning was complete; 0 without any."""
    text = (reply or {}).get("reasoning_content") or ""
    if not text:
        return 0
    completion_ids = generation.completion_ids
    low, high = 0, len(completion_ids)
    while low < high:
        middle = (low + high) // 2
        if text in template.decode_reply(completion_ids[:middle]):
            high = middle
        else:
            low = middle + 1
    return low


def _format_token(template: ChatTemplate, token_id: int, logprob: float) -> dict[str, Any]:
    spelled = _spell(template, token_id)
    return {
        "token": spelled.decode("utf-8", "replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def _spell(template: ChatTemplate, token_id: int) -> bytes:
    """The bytes of one token, which need not be whole characters."""
    tokenizer = template.tokenizer
    token = tokenizer.convert_ids_to_tokens(token_id)
    table = _build_byte_table()
    if (
        token is not None
        and token not in tokenizer.get_added_vocab()
        and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        and all(character in table for character in token)
    ):
        return bytes(table[character] for character in token)
    return tokenizer.decode([token_id]).encode("utf-8", "replace")


@cache
def _build_byte_table() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}
