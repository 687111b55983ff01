"""``/v1/chat/completions``, the way out: completions, stream chunks and errors as JSON."""

from __future__ import annotations

import json
from typing import Any

from agentrl_cli.records import Message

#: Says that a key is left out.
_UNSAID: dict[str, Any] = {}


def format_usage(
    num_prompt_tokens: int, num_completion_tokens: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    """OpenAI's token counts."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
    }


def format_choice(
    index: int, reply: Message, finish_reason: str, logprobs: dict[str, Any] | None
) -> dict[str, Any]:
    """One choice of a completion that is not streamed."""
    return {
        "index": index,
        "message": {"refusal": None, **reply},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
    }


def format_completion(
    completion_id: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any],
) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def format_chunk(
    completion_id: str,
    created: int,
    model: str,
    choices: list[dict[str, Any]],
    usage: dict[str, Any] | None = _UNSAID,
) -> dict[str, Any]:
    """One chunk of a streamed reply; ``usage`` is written, null or not, where it is given."""
    chunk: dict[str, Any] = {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": model,
        "choices": choices,
    }
    if usage is not _UNSAID:
        chunk["usage"] = usage
    return chunk


def format_event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def format_delta(
    index: int,
    delta: dict[str, Any],
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One choice of a streamed chunk."""
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def format_error(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
