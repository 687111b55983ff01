"""A tool call as chat completions write it, made of whatever a model wrote."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ParsedText:
    """What a piece of text adds to a message: content, complete tool calls, and thoughts."""

    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    reasoning: str = ""

    def add(self, other: ParsedText) -> None:
        """Takes in what came after."""
        self.content += other.content
        self.tool_calls.extend(other.tool_calls)
        self.reasoning += other.reasoning


def make_call_id() -> str:
    """An id for a call of a model that gives none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def build_call(name: Any, arguments: Any, call_id: str | None = None) -> dict[str, Any] | None:
    """The call in OpenAI's form, or None when these are no name and no arguments.

    Args:
        name: of the tool.
        arguments: an object, an object as JSON text, or None for no arguments.
        call_id: as the model wrote it; None: a new one.
    """
    if not isinstance(name, str) or not name or not _is_encodable(name):
        return None
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except (ValueError, RecursionError):
            return None
    text = _dump_arguments({} if arguments is None else arguments)
    if text is None:
        return None
    return {
        "id": call_id or make_call_id(),
        "type": "function",
        "function": {"name": name, "arguments": text},
    }


def build_call_of_object(data: Any, argument_keys: Sequence[str]) -> dict[str, Any] | None:
    """The call that a JSON object with ``name`` and arguments describes, or None."""
    if not isinstance(data, dict):
        return None
    arguments = next((data[key] for key in argument_keys if key in data), None)
    return build_call(data.get("name"), arguments)


def load_json(text: str) -> Any:
    """The data of a JSON text.

    Raises:
        ValueError: it is none; NaN and infinity, which Python's json knows, are none either.
        RecursionError: it is nested too deeply.
    """
    data, end = decode_json(text, 0)
    if text[end:].strip():
        raise ValueError("text follows the JSON")
    return data


def decode_json(text: str, begin: int) -> tuple[Any, int]:
    """The JSON data that stands at ``begin``, after white space, and where it ends.

    Raises as :func:`load_json`.
    """
    while begin < len(text) and text[begin].isspace():
        begin += 1
    return _DECODER.raw_decode(text, begin)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


#: Not strict: models write line breaks into strings, which is meant and not ambiguous.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)


def _dump_arguments(arguments: Any) -> str | None:
    """One JSON object as text that can be sent; None when there is no such text."""
    if not isinstance(arguments, dict):
        return None
    try:
        return make_encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return None


def make_encodable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs: JSON may have them, as escapes, but no
    tokenizer and no client takes them."""
    if _is_encodable(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
