"""When are two messages the same message? Equality by meaning, as a fingerprint.

Frameworks send an assistant's turn back in many spellings: ``content`` null, missing
or empty, arguments with other key order, keys added with null, its chain of thought as a key
of its own, inside the content, or left out. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from agentrl_cli.records import BreakCause, Message

_THINKING = re.compile(r"<think>.*?</think>\s*|^.*?</think>\s*", re.DOTALL)
#: Keys under which thoughts come back; canonical is the first.
_THOUGHT_KEYS = ("reasoning_content", "reasoning")
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


def strip_thinking(text: str) -> str:
    """``text`` without ``<think>`` blocks, also where the opening tag was in the prompt."""
    return _THINKING.sub("", text)


def extract_thought(message: Message) -> str:
    """The chain of thought of an assistant message, as a key of its own or inside the content.

    Empty: it has none, or came back without it.
    """
    for key in _THOUGHT_KEYS:
        thought = message.get(key)
        if isinstance(thought, str) and thought.strip():
            return thought.strip()
    head, found, _ = extract_text(message.get("content")).partition("</think>")
    return head.strip().removeprefix("<think>").strip() if found else ""


def holds_thought_in_content(message: Message) -> bool:
    """Whether an assistant message has its chain of thought between tags in its content."""
    return "</think>" in extract_text(message.get("content"))


def extract_answer(message: Message) -> str:
    """The text of an assistant message without its chain of thought."""
    text = extract_text(message.get("content"))
    if "</think>" in text and not any(message.get(key) for key in _THOUGHT_KEYS):
        return strip_thinking(text).lstrip()
    return text.lstrip()


def replays_thought(message: Message, thought: str) -> bool:
    """Whether a message has the thought that was sampled; frameworks may leave it out."""
    return extract_thought(message) in ("", thought)


def write_thought(message: Message, thought: str) -> Message:
    """The assistant message with ``thought`` as its chain of thought, in the canonical form."""
    bare = {key: value for key, value in message.items() if key not in _THOUGHT_KEYS}
    bare["content"] = extract_answer(message)
    return {**bare, _THOUGHT_KEYS[0]: thought} if thought else bare


def normalize_message(message: Message) -> list[Any]:
    """The meaning of a message as plain JSON data; equal meaning gives equal data.

    A chain of thought is no part of it: whether it came back is another question.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    is_reply = role == "assistant"
    text = extract_answer(message) if is_reply else extract_text(message.get("content"))
    known = _KNOWN_KEYS.union(_THOUGHT_KEYS) if is_reply else _KNOWN_KEYS
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


def diagnose_edit(sampled: Message, replayed: Message) -> BreakCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = normalize_message(sampled)
    _, other_text, other_calls, other_extras = normalize_message(replayed)
    # All of a call but its arguments.
    rests, other_rests = ([[*c[:2], c[3]] for c in side] for side in (calls, other_calls))
    same_thought = replays_thought(replayed, extract_thought(sampled))
    same_rest = text == other_text and extras == other_extras and same_thought
    if same_rest and calls != other_calls and rests == other_rests:
        return BreakCause.TOOL_ARGUMENTS_CHANGED
    # Who takes the thought away takes white space along.
    has_lost_thought = extract_thought(sampled) and not extract_thought(replayed)
    if has_lost_thought and calls == other_calls and text.strip() == other_text.strip():
        return BreakCause.THINKING_STRIPPED
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
