"""Sampled tokens as OpenAI's APIs report them: their text, bytes, logprobs and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.tracking.template import ChatTemplate


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
