"""How near a reply comes to the reversed words."""

from __future__ import annotations

from difflib import SequenceMatcher


def similarity(completions: str, answer: str) -> float:
    """The share of words, of both sides, that match in order: 1.0 for the answer itself."""
    said = completions.lower().split()
    return SequenceMatcher(None, said, answer.split(), autojunk=False).ratio()
