"""Games of some animals, one of them the secret."""

from __future__ import annotations

import random
from typing import Any

from examples.twenty_questions.answerer import ANIMALS
from examples.word_lists import is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """Games of four animals, of ``train`` or ``test``; they share no game."""
    return _build_rows(split, num_animals=4)


def build_hard_rows(split: str = "train") -> list[dict[str, Any]]:
    """Games of twelve animals: more than there are questions to name them one by one."""
    return _build_rows(split, num_animals=12)


def _build_rows(split: str, num_animals: int) -> list[dict[str, Any]]:
    chance = random.Random(f"twenty-questions {split}")
    rows: list[dict[str, Any]] = []
    while len(rows) < _NUM_ROWS[split]:
        animals = sorted(chance.sample(sorted(ANIMALS), num_animals))
        secret = chance.choice(animals)
        if is_held_out([*animals, secret]) == (split == "test"):
            rows.append({"animals": animals, "secret": secret})
    return rows
