"""Questions about numbers that are too large to be known by heart."""

from __future__ import annotations

import random
from typing import Any

from examples.word_lists import is_held_out

_NUM_ROWS = {"train": 2000, "test": 200}
_QUESTIONS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "-": ("What is {a} minus {b}?", "Subtract {b} from {a}.", "Take {b} away from {a}."),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
}


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no pair of numbers."""
    chance = random.Random(f"calculator-tools {split}")
    rows: list[dict[str, Any]] = []
    while len(rows) < _NUM_ROWS[split]:
        a, b = chance.randint(100, 999), chance.randint(11, 99)
        if is_held_out([str(a), str(b)]) != (split == "test"):
            continue
        sign = chance.choice(sorted(_QUESTIONS))
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        question = chance.choice(_QUESTIONS[sign]).format(a=a, b=b)
        expression = f"{a} {sign} {b}"
        rows.append({"question": question, "answer": str(answer), "expression": expression})
    return rows
