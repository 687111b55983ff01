"""Games of six animals, one of them the secret."""

from __future__ import annotations

import random
from typing import Any

from examples.twenty_questions.answerer import ANIMALS
from examples.word_lists import is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}
_NUM_ANIMALS = 6


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no game."""
    chance = random.Random(f"twenty-questions {split}")
    rows: list[dict[str, Any]] = []
    while len(rows) < _NUM_ROWS[split]:
        animals = sorted(chance.sample(sorted(ANIMALS), _NUM_ANIMALS))
        secret = chance.choice(animals)
        if is_held_out([*animals, secret]) == (split == "test"):
            rows.append({"animals": animals, "secret": secret})
    return rows
