"""Conversations in which the list grows as it should, for ``agentrl sft``."""

from __future__ import annotations

from typing import Any

from examples.alphabet_sort.agent import SYSTEM, format_request
from examples.alphabet_sort.tasks import build_rows


def build_demonstrations(num_rows: int = 48) -> list[dict[str, Any]]:
    """One conversation for each of the first training tasks."""
    return [{"messages": _converse(row)} for row in build_rows("train")[:num_rows]]


def _converse(row: dict[str, Any]) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": SYSTEM}]
    words: list[str] = []
    for added in row["turns"]:
        request = format_request(added, is_first=not words)
        words += added
        messages += [
            {"role": "user", "content": request},
            {"role": "assistant", "content": " ".join(sorted(words))},
        ]
    return messages
