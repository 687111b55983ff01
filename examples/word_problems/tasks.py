"""Word problems in the style of GSM8K, with numbers that a small model can take.

One in eight combinations of numbers and story is held out for the test split.
"""

from __future__ import annotations

import random
from typing import Any

from examples.word_lists import is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}
_NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Lily", "Noah", "Tom")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps")
_STORIES = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "a + b"),
    ("{name} has {total} {things} and gives away {b}. How many {things} are left?", "total - b"),
    ("There are {a} {things} in a box and {b} in a bag. How many {things} are there?", "a + b"),
    ("{name} finds {a} {things} on Monday and {b} on Tuesday. How many are these in all?", "a + b"),
    (
        "Of {total} {things}, {name} loses {b}. How many {things} does {name} still have?",
        "total - b",
    ),
    ("{name} has {a} boxes with {b} {things} in each. How many {things} are there?", "a * b"),
)


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no story with the same numbers."""
    chance = random.Random(f"word-problems {split}")
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < _NUM_ROWS[split]:
        story = chance.randrange(len(_STORIES))
        text, formula = _STORIES[story]
        a, b = chance.randint(2, 12), chance.randint(2, 12)
        if is_held_out([str(story), str(a), str(b)]) != (split == "test"):
            continue
        question = text.format(
            name=chance.choice(_NAMES), things=chance.choice(_THINGS), a=a, b=b, total=a + b
        )
        answer = {"a + b": a + b, "total - b": a, "a * b": a * b}[formula]
        rows[question] = {"question": question, "answer": str(answer)}
    return list(rows.values())
