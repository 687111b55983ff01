"""Anthropic's messages and content blocks as chat messages, the form that turns are known by.

An assistant's turn is one message whatever the order of its blocks: texts are put together,
so are thoughts, and calls keep their order. A reply that was streamed as text, call, text and
one that was sent as text, call therefore come back as the same turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from agentrl_cli.records import Message
from agentrl_cli.tracking.model_request import RequestError
from agentrl_cli.tracking.request_fields import take

#: The thinking behind a signature of ours; empty: unknown.
ThinkingLookup = Callable[[str], str]

_ROLES = ("user", "assistant", "system")
_SIGNATURE_PREFIX = "agentrl-"
#: Claude Code's first line of the system prompt. Its hash differs in every request, so that no
#: request would continue an earlier one; Anthropic does not show it to the model either.
_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def sign_thinking(thinking: str) -> str:
    """The signature of a thinking block, by which it is known when its text was left out."""
    digest = hashlib.blake2b(thinking.encode("utf-8", "surrogatepass"), digest_size=24)
    return f"{_SIGNATURE_PREFIX}{digest.hexdigest()}"


def convert_system(system: Any, where: str = "system") -> list[Message]:
    """The system prompt, text or text blocks, as a message; none if it is empty.

    Raises:
        RequestError: naming the block that is no text.
    """
    if isinstance(system, str):
        texts = [system]
    elif isinstance(system, list):
        texts = [_read_text(block, f"{where}.{index}") for index, block in enumerate(system)]
    else:
        raise RequestError(f"{where} must be text or a list of text blocks", where)
    texts = [_BILLING_HEADER.sub("", text) for text in texts]
    content = "\n".join(text for text in texts if text)
    return [{"role": "system", "content": content}] if content else []


def convert_messages(messages: Sequence[Any], find_thinking: ThinkingLookup) -> list[Message]:
    """Chat messages in OpenAI's form; neighbours of the user or the assistant become one.

    Args:
        messages: Anthropic's.
        find_thinking: restores thinking that was signed but not sent.

    Raises:
        RequestError: naming the block that cannot be read.
    """
    converted: list[Message] = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise RequestError(f"{where} must be an object, found {message!r:.80}", where)
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise RequestError(
                f"{where}.role is {role!r:.80}; allowed: {', '.join(_ROLES)}", f"{where}.role"
            )
        if not isinstance(content, str | list):
            raise RequestError(
                f"{where}.content must be text or a list of blocks, found {content!r:.80}",
                f"{where}.content",
            )
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        where = f"{where}.content"
        if role == "user":
            new = _convert_user(blocks, where)
        elif role == "assistant":
            new = [_convert_assistant(blocks, where, find_thinking)]
        else:
            new = convert_system(content, where)
        for one in new:
            _append(converted, one)
    return converted


def _append(messages: list[Message], message: Message) -> None:
    """Adds a message; Anthropic takes neighbours of one role for one turn."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != message["role"] or last["role"] not in ("user", "assistant"):
        messages.append(message)
    elif last["role"] == "user":
        last["content"] = f"{last['content']}\n{message['content']}"
    else:
        messages[-1] = _build_assistant(
            (last["content"] or "") + (message["content"] or ""),
            [*last.get("tool_calls", ()), *message.get("tool_calls", ())],
            last.get("reasoning_content", "") + message.get("reasoning_content", ""),
        )


def _convert_user(blocks: list[Any], where: str) -> list[Message]:
    """Results of tools become messages of their own, the texts between them the user's."""
    converted: list[Message] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            converted.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        kind = _read_kind(block, place)
        if kind == "tool_result":
            end_text()
            converted.append(_convert_result(block, place))
        else:
            texts.append(_read_text(block, place, allowed="text, tool_result"))
    end_text()
    return converted or [{"role": "user", "content": ""}]


def _convert_result(block: dict[str, Any], where: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        raise RequestError(
            f"{where}.tool_use_id must be the id of a tool_use block, found {call_id!r:.80}",
            f"{where}.tool_use_id",
        )
    content = block.get("content")
    if content is None or isinstance(content, str):
        text = content or ""
    elif isinstance(content, list):
        places = (f"{where}.content.{index}" for index in range(len(content)))
        text = "\n".join(map(_read_text, content, places))
    else:
        raise RequestError(
            f"{where}.content must be text or a list of text blocks", f"{where}.content"
        )
    # Templates have no word for a failed tool, and the model must not take it for a result.
    if take(block, "is_error", bool, False, f"{where}.") and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _convert_assistant(blocks: list[Any], where: str, find_thinking: ThinkingLookup) -> Message:
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(blocks):
        place = f"{where}.{index}"
        kind = _read_kind(block, place)
        if kind == "tool_use":
            calls.append(_convert_call(block, place))
        elif kind == "thinking":
            thinking = take(block, "thinking", str, "", f"{place}.")
            signature = take(block, "signature", str, "", f"{place}.")
            reasoning += thinking or find_thinking(signature)
        elif kind != "redacted_thinking":  # Which is another model's, and not to be read.
            content += _read_text(
                block, place, allowed="text, tool_use, thinking, redacted_thinking"
            )
    return _build_assistant(content, calls, reasoning)


def _convert_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    for key in ("id", "name"):
        if not isinstance(block.get(key), str) or not block[key]:
            raise RequestError(
                f"{where}.{key} must be text, found {block.get(key)!r:.80}", f"{where}.{key}"
            )
    arguments = take(block, "input", dict, {}, f"{where}.")
    return {
        "id": block["id"],
        "type": "function",
        "function": {
            "name": block["name"],
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _build_assistant(content: str, calls: list[dict[str, Any]], reasoning: str) -> Message:
    """An assistant's message as replies are recorded."""
    message: Message = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def _read_kind(block: Any, where: str) -> str:
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise RequestError(f"{where} must be a block with a type, found {block!r:.80}", where)
    return block["type"]


def _read_text(block: Any, where: str, allowed: str = "text") -> str:
    """The text of a text block."""
    kind = _read_kind(block, where)
    if kind in ("image", "document"):
        raise RequestError(
            f"{where} is of type {kind!r}, and the model reads text only; send the content as a "
            "text block",
            where,
        )
    if kind != "text":
        raise RequestError(
            f"{where} is of type {kind!r:.80}, which is not supported here; allowed: {allowed}",
            where,
        )
    if not isinstance(block.get("text"), str):
        raise RequestError(
            f"{where}.text must be text, found {block.get('text')!r:.80}", f"{where}.text"
        )
    return block["text"]
