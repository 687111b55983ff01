"""What messages say, in whatever spelling they came, and the histories that requests share.

Turns are compared by meaning. Frameworks send an assistant's turn back in many spellings:
``content`` null, missing or empty, arguments with other key order, keys added with null, its
reasoning as a key of its own, inside the content, or left out. Those are the same turn.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import orjson

from agentrl_cli.records import Message, MismatchCause, SharedSequence

#: Made once: ``json.dumps`` with options makes an encoder for every call.
write_json = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
#: Also where the opening tag was in the prompt.
_REASONING = re.compile(r"<think>.*?</think>\s*|^.*?</think>\s*", re.DOTALL)
#: Keys under which reasoning comes back; the first is the canonical one.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: What a message says in the terms of every chat protocol.
_COMMON_KEYS = frozenset({"role", "content", "tool_calls"})


def find_extras(message: Message) -> dict[str, Any]:
    """What a message says under keys of a framework's own; those that say nothing are left out."""
    known = _COMMON_KEYS.union(_REASONING_KEYS if message["role"] == "assistant" else ())
    extras = {key: _drop_nulls(value) for key, value in message.items() if key not in known}
    return {key: value for key, value in extras.items() if value not in (None, "", [], {})}


def list_own_keys(message: Message) -> list[str]:
    """The keys of a framework's own that say something: they count if the template reads them.

    What a tool's result answers counts whatever the template shows.
    """
    return [key for key in find_extras(message) if key != "tool_call_id"]


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _drop_nulls(v) for k, v in value.items() if v is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def extract_text(content: Any, separator: str = "") -> str:
    """The text of a message's ``content``: null, a string, or a list of text parts.

    Parts of what a model said are pieces of one text; those of other messages are joined by
    another ``separator``.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return separator.join(part.get("text") or "" for part in content)


def extract_reasoning(message: Message) -> str:
    """The reasoning of an assistant message, from a key of its own or inside the content.

    Empty: it has none, or came back without it.
    """
    return _read_reasoning_key(message) or _read_reasoning_tags(message)


def _read_reasoning_key(message: Message) -> str:
    for key in _REASONING_KEYS:
        reasoning = message.get(key)
        if isinstance(reasoning, str) and reasoning.strip():
            return reasoning.strip()
    return ""


def _read_reasoning_tags(message: Message) -> str:
    head, found, _ = extract_text(message.get("content")).partition("</think>")
    return head.strip().removeprefix("<think>").strip() if found else ""


def holds_reasoning_in_content(message: Message) -> bool:
    """Whether an assistant message has its reasoning between tags in its content alone."""
    has_tags = "</think>" in extract_text(message.get("content"))
    return has_tags and not _read_reasoning_key(message)


def extract_answer(message: Message) -> str:
    """The text of an assistant message without its reasoning.

    Under a key of its own it may stand in the content as well; other text between the tags is
    part of the answer then.
    """
    text = extract_text(message.get("content"))
    own = _read_reasoning_key(message)
    if "</think>" in text and own in ("", _read_reasoning_tags(message)):
        return _REASONING.sub("", text).lstrip()
    return text.lstrip()


def write_reasoning(message: Message, reasoning: str) -> Message:
    """The assistant message with ``reasoning``, in the canonical form."""
    bare = {key: value for key, value in message.items() if key not in _REASONING_KEYS}
    bare["content"] = extract_answer(message)
    return {**bare, _REASONING_KEYS[0]: reasoning} if reasoning else bare


def parse_arguments(arguments: Any, **options: Any) -> Any:
    """Tool arguments as JSON data; text that is not JSON stays text.

    ``options``: as ``json.loads`` has them.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments, **options)
    except (ValueError, RecursionError):
        # Brackets nested without end are no arguments either.
        return arguments


def replays_reasoning(message: Message, reasoning: str) -> bool:
    """Whether a message has the reasoning that was sampled; frameworks may leave it out."""
    return extract_reasoning(message) in ("", reasoning)


def _normalize(message: Message) -> list[Any]:
    """The meaning of a message as plain JSON data; equal meaning gives equal data.

    Reasoning is no part of it: whether it came back is another question.
    """
    role = "system" if message["role"] == "developer" else message["role"]
    is_reply = role == "assistant"
    text = extract_answer(message) if is_reply else extract_text(message.get("content"), "\n")
    calls = [_normalize_call(call) for call in message.get("tool_calls") or ()]
    return [role, text, calls, find_extras(message)]


def fingerprint(message: Message, previous: bytes = b"") -> bytes:
    """A digest of a message's meaning and of all that came before it."""
    meaning = write_json(_normalize(message)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(meaning, key=previous, digest_size=16).digest()


def fingerprint_reply(message: Message) -> bytes:
    """A digest of what a reply says, without the keys of a framework's own."""
    extras = find_extras(message)
    return fingerprint({key: value for key, value in message.items() if key not in extras})


def diagnose_edit(sampled: Message, replayed: Message) -> MismatchCause:
    """Why ``replayed`` is not the turn that was ``sampled`` at its place."""
    _, text, calls, extras = _normalize(sampled)
    _, other_text, other_calls, other_extras = _normalize(replayed)
    # All of a call but its arguments.
    rests, other_rests = ([call[:2] for call in side] for side in (calls, other_calls))
    same_reasoning = replays_reasoning(replayed, extract_reasoning(sampled))
    same_rest = text == other_text and extras == other_extras and same_reasoning
    if same_rest and calls != other_calls and rests == other_rests:
        return MismatchCause.TOOL_ARGUMENTS_CHANGED
    # Whoever removes the reasoning removes white space with it.
    has_lost_reasoning = extract_reasoning(sampled) and not extract_reasoning(replayed)
    if has_lost_reasoning and calls == other_calls and text.strip() == other_text.strip():
        return MismatchCause.THINKING_STRIPPED
    return MismatchCause.HISTORY_EDITED


def _normalize_call(call: dict[str, Any]) -> list[Any]:
    function = call.get("function") or {}
    arguments = parse_arguments(function.get("arguments"), parse_float=_parse_number)
    return [call.get("id"), function.get("name"), arguments]


def _parse_number(text: str) -> float:
    """A number with a fraction or an exponent; 1.0 is 1, as programs in JavaScript send it back."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number


def is_same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON, to the order of keys; to Python 1, 1.0 and True are
    equal."""
    return one == other and marshal.dumps(one, 0) == marshal.dumps(other, 0)


def write_open_list(messages: Sequence[Message], before: bytes = b"") -> bytes:
    """A JSON list of messages without its end, which every list that continues it begins with;
    ``before``: that of others, which come first. Empty where a number is too large for it."""
    try:
        # In a tenth of the time that comparing message by message takes.
        written = orjson.dumps([*messages])[:-1]
    except orjson.JSONEncodeError:
        return b""
    return b"%b,%b" % (before, written[1:]) if before and messages else before or written


def share_texts(value: Any) -> Any:
    """Equal JSON, whose texts and keys are held once however many messages have them."""
    if isinstance(value, dict):
        return {sys.intern(key): share_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [share_texts(item) for item in value]
    return sys.intern(value) if type(value) is str else value


def describe_turn(message: Message) -> str:
    """Equal for messages that templates treat alike: by who speaks, and how."""
    num_calls = min(len(message.get("tool_calls") or ()), 2)
    has_text = bool(extract_text(message.get("content")).strip())
    return sys.intern(f"{message['role']} {num_calls} {has_text}")


class MessageHistory(SharedSequence[Message]):
    """The messages of a request; requests that begin alike share them, and what is known of them.

    Args:
        message: the last one; None: there are no messages yet.
        before: those before it.
        unread: the keys of the last one that the template does not read.
        case: of the inputs on which it depends what the template reads; None: on none.
    """

    __slots__ = ("_next", "_unread", "before", "case", "digest", "is_given", "turn", "turns")
    # By identity: each is made once.
    __hash__ = object.__hash__

    def __init__(
        self,
        message: Message | None = None,
        before: MessageHistory | None = None,
        unread: tuple[str, ...] = (),
        case: Hashable = None,
    ) -> None:
        super().__init__(() if message is None else (message,), before)
        self.before = before
        self.case = case
        self._unread = unread
        self._next: tuple[MessageHistory, ...] = ()
        self.digest = b""
        """Of the meaning of all messages; empty: there are none."""
        self.turn = ""
        """Who speaks last, and how."""
        self.turns: frozenset[tuple[str, str]] = frozenset()
        """Who speaks after whom."""
        if before is not None:
            self.digest = fingerprint(self.read, before.digest)
            self.turn = describe_turn(self.message)
            pair = (before.turn, self.turn)
            # Mostly one that was there before: then the set is held once.
            self.turns = before.turns if pair in before.turns else before.turns | {pair}
        self.is_given = False
        """True: a request that matched had them."""

    @property
    def message(self) -> Message:
        """The last message."""
        return self.own[0]

    @property
    def read(self) -> Message:
        """The last message without the keys that the template does not read."""
        if not self._unread:
            return self.message
        return {key: value for key, value in self.message.items() if key not in self._unread}

    def fits(self, case: Hashable) -> bool:
        """Whether the template reads the same keys with inputs of this case."""
        return self.case is None or self.case == case

    def find_next(self, message: Any, case: Hashable = None) -> MessageHistory | None:
        """These messages and one more, if a request had them; of any case, if none is given."""
        found = (h for h in self._next if case is None or h.fits(case))
        return next((h for h in found if is_same_json(h.message, message)), None)

    def add_next(self, following: MessageHistory) -> None:
        """Lets later requests find these messages and one more."""
        self._next += (following,)

    @property
    def beginnings(self) -> list[MessageHistory]:
        """Entry i is the first i messages."""
        found: list[MessageHistory] = []
        history: MessageHistory | None = self
        while history is not None:
            found.append(history)
            history = history.before
        return found[::-1]
