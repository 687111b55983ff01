"""How near a turn's reply comes to the sorted list."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def score_turn(reply: str, words: Sequence[str]) -> float:
    """The words that match in order, as a share of the longer list: 1.0 for the sorted list itself.

    ``SequenceMatcher.ratio`` would be kinder to short replies: two words of six, in order, would
    earn 0.5, and this share gives them 0.33.
    """
    said = reply.lower().replace(",", " ").split()
    matcher = SequenceMatcher(None, said, sorted(words), autojunk=False)
    num_matching = sum(block.size for block in matcher.get_matching_blocks())
    return num_matching / max(len(said), len(words))
