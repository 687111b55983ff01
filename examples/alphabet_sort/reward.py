"""How near a turn's reply comes to the sorted list."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def score_turn(reply: str, words: Sequence[str]) -> float:
    """The share of words, of both sides, that match in order: 1.0 for the sorted list itself."""
    said = reply.lower().replace(",", " ").split()
    return SequenceMatcher(None, said, sorted(words), autojunk=False).ratio()
