"""Words in three portions: two or three to begin with, then one or two more twice."""

from __future__ import annotations

import random
from typing import Any

from examples.word_lists import ANIMALS, THINGS, is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no row."""
    chance = random.Random(f"alphabet-sort {split}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < _NUM_ROWS[split]:
        sizes = [chance.randint(2, 3), chance.randint(1, 2), chance.randint(1, 2)]
        words = chance.sample(ANIMALS + THINGS, sum(sizes))
        if is_held_out(words) == (split == "test"):
            left = iter(words)
            turns = [[next(left) for _ in range(size)] for size in sizes]
            rows[" ".join(words)] = {"turns": turns}
    return list(rows.values())
