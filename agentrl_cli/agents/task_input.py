"""What an agent is asked: found in the row under the names that datasets use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl_cli.errors import DatasetError

#: The first of these fields that a row has is the agent's input.
INPUT_FIELDS = ("messages", "question", "prompt", "input")


def find_input(row: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The row's ``messages`` (a list of chat messages), else ``question``, ``prompt``, ``input``.

    A ``prompt`` or ``input`` may hold a list of chat messages too.

    Raises:
        DatasetError: none of them is there, or the one that is has another form.
    """
    for name in INPUT_FIELDS:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, str) and name != "messages":
            return value
        if isinstance(value, list) and value and all(_is_message(m) for m in value):
            return [dict(m) for m in value]
        raise DatasetError(
            f"the row's field {name!r} is {type(value).__name__} ({value!r:.80}); allowed: "
            "text, or a list of {'role': ..., 'content': ...}"
            + (" (for messages: the list only)" if name == "messages" else "")
        )
    raise DatasetError(
        f"nothing to ask the agent: the row has the fields {', '.join(map(repr, row))}; one of "
        f"{', '.join(INPUT_FIELDS)} is needed. Rename the field, or build an object with "
        "async def run(data, client) that reads the row itself"
    )


def find_prompt_text(row: Mapping[str, Any]) -> str:
    """The input as text for reward functions; of messages, the last one of the user."""
    value = next((row[name] for name in ("prompt", *INPUT_FIELDS) if row.get(name)), "")
    if not isinstance(value, list):
        return str(value)
    asked = [m for m in value if _is_message(m) and m["role"] == "user"]
    return str(asked[-1].get("content") or "") if asked else ""


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)
