"""When are two messages the same message? Equality by meaning, as a fingerprint.

Frameworks send an assistant's turn back in many spellings: ``content`` null, missing
or empty, arguments with other key order, keys added with null. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from agentrl_cli.records import BreakCause, Message

_THINKING = re.compile(r"<think>.*?</think>\s*|^.*?</think>\s*", re.DOTALL)
#: Keys whose meaning is covered below, or that only number the pieces of a stream.
_KNOWN_KEYS = frozenset({"role", "content", "tool_calls"})
_KNOWN_CALL_KEYS = frozenset({"id", "type", "function", "index"})


def extract_text(content: Any) -> str:
    """The text of a message's ``content``: null, a string, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


def strip_thinking(text: str) -> str:
    """``text`` without ``<think>`` blocks, also where the opening tag was in the prompt."""
    return _THINKING.sub("", text)


def extract_thought(message: Message) -> str:
    """The text inside the ``<think>`` block of an assistant message; empty: none."""
    head, found, _ = extract_text(message.get("content")).partition("</think>")
    return head.removeprefix("<think>").strip() if found else ""


def has_thinking(message: Message) -> bool:
    """Whether an assistant message carries a chain of thought."""
    return "</think>" in extract_text(message.get("content")) or bool(
        message.get("reasoning_content") or message.get("reasoning")
    )


def normalize_message(message: Message) -> list[Any]:
    """The meaning of a message as plain JSON data; equal meaning gives equal data."""
    role = "system" if message["role"] == "developer" else message["role"]
    extras = {k: v for k, v in message.items() if k not in _KNOWN_KEYS and _carries_meaning(v)}
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return [role, extract_text(message.get("content")), calls, extras]


def fingerprint(message: Message, previous: bytes = b"") -> bytes:
    """A digest of a message's meaning and of all that came before it."""
    data = json.dumps(normalize_message(message), sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(data.encode("utf-8", "surrogatepass"), key=previous[:64]).digest()


def fingerprint_prefixes(messages: Iterable[Message]) -> list[bytes]:
    """Entry i is the digest of the first i messages; entry 0 stands for none."""
    digests = [b""]
    for message in messages:
        digests.append(fingerprint(message, digests[-1]))
    return digests


def diagnose_edit(sampled: Message, replayed: Message) -> BreakCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = normalize_message(sampled)
    _, other_text, other_calls, other_extras = normalize_message(replayed)
    same_text = text == other_text
    if has_thinking(sampled) and calls == other_calls:
        stripped = strip_thinking(text).strip() == strip_thinking(other_text).strip()
        if stripped and not has_thinking(replayed):
            return BreakCause.THINKING_STRIPPED
    # All of a call but its arguments: by another id or name it is another call.
    heads, other_heads = ([(c[0], c[1], c[3]) for c in side] for side in (calls, other_calls))
    if same_text and extras == other_extras and calls != other_calls and heads == other_heads:
        return BreakCause.TOOL_ARGUMENTS_CHANGED
    return BreakCause.HISTORY_EDITED


def _carries_meaning(value: Any) -> bool:
    return value is not None and value not in ("", [], {})


def _normalize_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    extras = {k: v for k, v in call.items() if k not in _KNOWN_CALL_KEYS and _carries_meaning(v)}
    arguments = _parse_json(function.get("arguments"), parse_float=_parse_number)
    return [call.get("id"), function.get("name"), arguments, extras]


def parse_arguments(arguments: Any) -> Any:
    """Tool arguments as JSON data; text that is not JSON stays text."""
    return _parse_json(arguments)


def _parse_json(text: Any, **options: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text, **options)
    except (ValueError, RecursionError):
        # Brackets nested without end are no arguments either.
        return text


def _parse_number(text: str) -> float:
    """A number with a fraction or an exponent; 1.0 is 1, as programs in JavaScript send it back."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
