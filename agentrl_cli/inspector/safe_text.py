"""Text of models and tools, made safe to print on a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from agentrl_cli.log import clean


def one_line(text: str, width: int) -> str:
    """The beginning of ``text`` on one line."""
    line = " ".join(clean(text).split())
    return line if len(line) <= width else line[: width - 1] + "…"


def format_number(value: float | None, digits: int = 3) -> str:
    """A number, or ``-`` for none."""
    if value is None or math.isnan(value):
        return "-" if value is None else "NaN"
    return f"{value:.{digits}f}"


def format_versions(versions: Sequence[int]) -> str:
    """``3`` or ``3-4``: the policy versions that sampled a reply."""
    if not versions:
        return "-"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low}-{high}"


def read_text(content: Any) -> str:
    """A message's content as text: parts that are none, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else _to_json(part)
        for part in parts
    )


def format_message(message: Any) -> Text:
    """One message: role, text, tool calls with their arguments."""
    if not isinstance(message, dict):
        return Text(clean(_to_json(message)))
    role = str(message.get("role", "?"))
    text = Text()
    text.append(f"{role}", style=_ROLE_STYLES.get(role, "bold"))
    call_id = message.get("tool_call_id")
    if isinstance(call_id, str):
        text.append(f" ({clean(call_id)})", style="dim")
    body = clean(read_text(message.get("content")))
    if body:
        text.append(": ").append(body)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        text.append("\n  calls ", style="magenta").append(_format_call(call))
    return text


def _format_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return clean(_to_json(call))
    arguments = function.get("arguments")
    shown = arguments if isinstance(arguments, str) else _to_json(arguments)
    return clean(f"{function.get('name', '?')}({shown})")


_ROLE_STYLES = {
    "system": "bold blue",
    "developer": "bold blue",
    "user": "bold cyan",
    "assistant": "bold green",
    "tool": "bold magenta",
}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=repr)
