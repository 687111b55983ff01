"""``/v1/responses``, the items of its input: what they are in chat messages.

The output of one turn comes back as several items (thoughts, text, calls); they become one
assistant message again, so that the turn is found by its meaning whatever it was sent back as.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl_cli.records import Interaction, Message
from agentrl_cli.tracking.model_request import RequestError
from agentrl_cli.tracking.request_fields import take

ID_PREFIX = "resp_"
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_[0-9]+")
#: Parts of an item's content that are text, and the key that holds it.
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
_MESSAGE_ROLES = ("user", "assistant", "system", "developer")

FindReply = Callable[[str], Interaction | None]


def build_item_id(kind: str, response_id: str, index: int) -> str:
    """The id of an output item: ``msg``, ``rs`` or ``fc``, its response and its place there.

    Items that are sent back say by it which of them were one turn.
    """
    return f"{kind}_{response_id.removeprefix(ID_PREFIX)}_{index}"


def find_response_id(item: Mapping[str, Any]) -> str | None:
    """The response that an item is from; None where its id does not say."""
    item_id = item.get("id")
    found = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return f"{ID_PREFIX}{found[1]}" if found else None


def parse_input(value: Any, find_reply: FindReply) -> list[Message]:
    """The messages of a response's ``input``.

    Args:
        value: a text, or a list of items.
        find_reply: the session's completed reply of a response id. Reasoning items that come
            back empty are filled from it.

    Raises:
        RequestError: naming the item that is wrong.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise RequestError("input must be text or a list of items", "input")
    reader = _ItemReader(find_reply)
    for index, item in enumerate(value):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where} must be an object", where)
        reader.read(item, where)
    return reader.close()


@dataclass(slots=True)
class _Turn:
    """The output items of one turn, as far as they have come."""

    response_id: str | None
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """Of its calls; some agents send each right after its call."""

    def takes(self, kind: str, response_id: str | None) -> bool:
        """Whether a further item of ``kind`` belongs to this turn."""
        if response_id is not None and self.response_id is not None:
            return response_id == self.response_id
        if self.results:
            return False
        if kind == "reasoning":
            return not self.texts and not self.calls
        # Two messages in a row are two turns, unless calls show that one goes on.
        return kind == "function_call" or not self.texts or bool(self.calls)

    def build_messages(self) -> list[Message]:
        """The turn, and the results that came for it."""
        content = "".join(self.texts)
        message: Message = {"role": "assistant", "content": content or (None if self.calls else "")}
        if self.calls:
            message["tool_calls"] = self.calls
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        return [message, *self.results]


class _ItemReader:
    """Turns items into messages, one after the other."""

    def __init__(self, find_reply: FindReply) -> None:
        self._find_reply = find_reply
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def read(self, item: Mapping[str, Any], where: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "message":
            self._read_message(item, where)
        elif kind == "reasoning":
            turn = self._open_turn(item, kind)
            turn.reasoning.append(self._read_reasoning(item, where))
        elif kind == "function_call":
            self._open_turn(item, kind).calls.append(_read_call(item, where))
        elif kind == "function_call_output":
            results = self._messages if self._turn is None else self._turn.results
            results.append(_read_output(item, where))
        elif kind == "item_reference":
            raise RequestError(
                f"{where} refers to the stored item {item.get('id')!r:.80}; items are not looked "
                "up here: send the item itself, or use previous_response_id",
                where,
            )
        else:
            raise RequestError(
                f"{where} is of type {kind!r:.80}; allowed: message, reasoning, function_call, "
                "function_call_output. Built-in tools of other providers do not run here",
                where,
            )

    def close(self) -> list[Message]:
        self._close_turn()
        return self._messages

    def _read_message(self, item: Mapping[str, Any], where: str) -> None:
        role = item.get("role")
        if role not in _MESSAGE_ROLES:
            raise RequestError(
                f"{where}.role is {role!r:.80}; allowed: {', '.join(_MESSAGE_ROLES)}",
                f"{where}.role",
            )
        texts = read_texts(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._open_turn(item, "message").texts.extend(texts)
            return
        self._close_turn()
        # "system" is kept for the instructions, which the next response does not take over.
        role = "developer" if role == "system" else role
        self._messages.append({"role": role, "content": _build_content(texts)})

    def _read_reasoning(self, item: Mapping[str, Any], where: str) -> str:
        for key in ("content", "summary"):
            text = "".join(read_texts(item.get(key) or [], f"{where}.{key}"))
            if text:
                return text
        response_id = find_response_id(item)
        interaction = self._find_reply(response_id) if response_id is not None else None
        reply = (interaction.reply if interaction is not None else None) or {}
        return str(reply.get("reasoning_content") or "")

    def _open_turn(self, item: Mapping[str, Any], kind: str) -> _Turn:
        response_id = find_response_id(item)
        if self._turn is not None and not self._turn.takes(kind, response_id):
            self._close_turn()
        if self._turn is None:
            self._turn = _Turn(response_id)
        self._turn.response_id = self._turn.response_id or response_id
        return self._turn

    def _close_turn(self) -> None:
        if self._turn is not None:
            self._messages += self._turn.build_messages()
        self._turn = None


def read_texts(content: Any, where: str) -> list[str]:
    """The texts of an item's content.

    Raises:
        RequestError: it is none, or holds images, audio or files.
    """
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        text = part.get(key) if key is not None else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} has a part of type {kind!r:.80}; this engine reads text parts only: no "
                "images, no audio, no files",
                where,
            )
        texts.append(text)
    return texts


def _build_content(texts: list[str]) -> str | list[dict[str, str]]:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


def _read_call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    name = take(item, "name", str, "", f"{where}.")
    call_id = take(item, "call_id", str, "", f"{where}.")
    if not name or not call_id:
        raise RequestError(f"{where} of type function_call needs name and call_id", where)
    arguments = take(item, "arguments", str, "{}", f"{where}.")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _read_output(item: Mapping[str, Any], where: str) -> Message:
    call_id = take(item, "call_id", str, "", f"{where}.")
    if not call_id:
        raise RequestError(f"{where} of type function_call_output needs call_id", where)
    texts = read_texts(item.get("output"), f"{where}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": _build_content(texts)}
