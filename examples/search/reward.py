"""Whether the answer is right, and whether what it follows from was found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_FOUND_SHARE = 0.4


def score(
    completions: str, answer: str, evidence: Sequence[str], messages: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """The reward and its parts: a share for each text of the evidence that a search brought, the
    rest for the right place as the answer."""
    results = [str(m["content"]) for m in messages if m["role"] == "tool"]
    found = sum(text in results for text in evidence) / len(evidence)
    is_right = float(completions.strip().rstrip(".").lower() == answer.lower())
    return {
        "reward": _FOUND_SHARE * found + (1 - _FOUND_SHARE) * is_right,
        "found": found,
        "accuracy": is_right,
    }
