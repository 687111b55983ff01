"""Sampled tokens as OpenAI's APIs report them: their text, bytes, logprobs and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.tracking.reply_text import ReplyReader
from agentrl_cli.tracking.template import ChatTemplate
from agentrl_cli.tracking.tool_calls import ParsedText


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
    """The logprobs of a reply's text alone: not of its thoughts, its calls and what marks them.

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
        # One by one: which of them are text is known by when text comes of them.
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
        # What stands before the text is a mark, such as the end of a thought.
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(held[first]["bytes"])
        return held[first:]


def count_tokens_until(template: ChatTemplate, completion_ids: Sequence[int], text: str) -> int:
    """How many tokens were sampled until ``text`` was complete; 0 for no text."""
    if not text:
        return 0
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
    """The byte that each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves, the other bytes for characters from
    256 on, in order (Radford et al. 2019, the vocabulary of GPT-2).
    """
    table = {}
    num_shifted = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(256 + num_shifted)] = byte
            num_shifted += 1
    return table
