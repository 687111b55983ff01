"""Lines of three to five words, and the same words reversed."""

from __future__ import annotations

import random
from typing import Any

from examples.word_lists import ANIMALS, THINGS, is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no line."""
    chance = random.Random(f"reverse-text {split}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < _NUM_ROWS[split]:
        words = chance.sample(ANIMALS + THINGS, chance.randint(3, 5))
        if is_held_out(words) == (split == "test"):
            text = " ".join(words)
            rows[text] = {"text": text, "answer": " ".join(reversed(words))}
    return list(rows.values())
