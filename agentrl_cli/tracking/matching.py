"""When are two messages the same message? Equality by meaning, as a fingerprint.

Frameworks send an assistant's turn back in many spellings: ``content`` null, missing
or empty, arguments with other key order, keys added with null, its reasoning as a key of its
own, inside the content, or left out. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from agentrl_cli.records import Message, MismatchCause

_REASONING = re.compile(r"<think>.*?</think>\s*|^.*?</think>\s*", re.DOTALL)
#: Keys under which reasoning comes back; the first is the canonical one.
_REASONING_KEYS = ("reasoning_content", "reasoning")
#: Made once: ``json.dumps`` with options makes an encoder for every call.
_write_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
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


def strip_reasoning(text: str) -> str:
    """``text`` without ``<think>`` blocks, also where the opening tag was in the prompt."""
    return _REASONING.sub("", text)


def extract_reasoning(message: Message) -> str:
    """The reasoning of an assistant message, from a key of its own or inside the content.

    Empty: it has none, or came back without it.
    """
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip():
            return reasoning.strip()
    head, found, _ = extract_text(message.get("content")).partition("</think>")
    return head.strip().removeprefix("<think>").strip() if found else ""


def holds_reasoning_in_content(message: Message) -> bool:
    """Whether an assistant message has its reasoning between tags in its content."""
    return "</think>" in extract_text(message.get("content"))


def extract_answer(message: Message) -> str:
    """The text of an assistant message without its reasoning."""
    text = extract_text(message.get("content"))
    if "</think>" in text and not any(message.get(key) for key in _REASONING_KEYS):
        return strip_reasoning(text).lstrip()
    return text.lstrip()


def replays_reasoning(message: Message, reasoning: str) -> bool:
    """Whether a message has the reasoning that was sampled; frameworks may leave it out."""
    return extract_reasoning(message) in ("", reasoning)


def write_reasoning(message: Message, reasoning: str) -> Message:
    """The assistant message with ``reasoning``, in the canonical form."""
    bare = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    bare["content"] = extract_answer(message)
    return {**bare, _REASONING_KEYS[0]: reasoning} if reasoning else bare


def normalize_message(message: Message) -> list[Any]:
    """The meaning of a message as plain JSON data; equal meaning gives equal data.

    Reasoning is no part of it: whether it came back is another question.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    is_reply = role == "assistant"
    text = extract_answer(message) if is_reply else extract_text(message.get("content"))
    known = _KNOWN_KEYS.union(_REASONING_KEYS) if is_reply else _KNOWN_KEYS
    extras = {k: v for k, v in message.items() if k not in known and _carries_meaning(v)}
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, extras]


def fingerprint(message: Message, previous: bytes = b"") -> bytes:
    """A digest of a message's meaning and of all that came before it."""
    return digest_meaning(write_meaning(message), previous)


def write_meaning(message: Message) -> bytes:
    """A message's meaning as text; equal meaning gives equal text."""
    return _write_json(normalize_message(message)).encode("utf-8", "surrogatepass")


def digest_meaning(meaning: bytes, previous: bytes = b"") -> bytes:
    """As :func:`fingerprint`, of a meaning that was written before."""
    return hashlib.blake2b(meaning, key=previous[:64]).digest()


def fingerprint_prefixes(messages: Iterable[Message]) -> list[bytes]:
    """Entry i is the digest of the first i messages; entry 0 stands for none."""
    digests = [b""]
    for message in messages:
        digests.append(fingerprint(message, digests[-1]))
    return digests


def diagnose_edit(sampled: Message, replayed: Message) -> MismatchCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = normalize_message(sampled)
    _, other_text, other_calls, other_extras = normalize_message(replayed)
    # All of a call but its arguments.
    rests, other_rests = ([[*c[:2], c[3]] for c in side] for side in (calls, other_calls))
    same_reasoning = replays_reasoning(replayed, extract_reasoning(sampled))
    same_rest = text == other_text and extras == other_extras and same_reasoning
    if same_rest and calls != other_calls and rests == other_rests:
        return MismatchCause.TOOL_ARGUMENTS_CHANGED
    # Whoever removes the reasoning removes white space with it.
    has_lost_reasoning = extract_reasoning(sampled) and not extract_reasoning(replayed)
    if has_lost_reasoning and calls == other_calls and text.strip() == other_text.strip():
        return MismatchCause.THINKING_STRIPPED
    return MismatchCause.HISTORY_EDITED


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
