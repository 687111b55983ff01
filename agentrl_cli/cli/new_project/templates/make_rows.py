"""Makes the rows of data/: python make_rows.py [SEED]. The same seed makes the same rows."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_ROWS = {"train": 128, "test": 64}

# The built-in model knows questions of these kinds, with numbers of two digits.
QUESTIONS = {
    "+": (
        "{name} has {a} {thing} and finds {b} more. How many {thing} are there?",
        "There are {a} {thing} in a box and {b} in a bag. How many in all?",
        "What is {a} plus {b}?",
    ),
    "-": (
        "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
        "A shop has {a} {thing} and sells {b}. How many are left?",
        "What is {a} minus {b}?",
    ),
}
NAMES = ("Ana", "Ben", "Eva", "Ida", "Leo", "Mia", "Sam", "Tom")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "rolls", "stamps")


def build_rows(seed: int = 1) -> dict[str, list[dict[str, str]]]:
    """The rows to train on, and the held-out ones; no two ask about the same numbers."""
    chance = random.Random(seed)
    pairs = [(a, b) for a in range(12, 100) for b in range(11, a)]
    chosen = iter(chance.sample(pairs, sum(NUM_ROWS.values())))
    return {
        split: [_build_row(chance, *next(chosen)) for _ in range(num_rows)]
        for split, num_rows in NUM_ROWS.items()
    }


def _build_row(chance: random.Random, a: int, b: int) -> dict[str, str]:
    operator = chance.choice(sorted(QUESTIONS))
    question = chance.choice(QUESTIONS[operator]).format(
        a=a, b=b, name=chance.choice(NAMES), thing=chance.choice(THINGS)
    )
    return {"question": question, "answer": str(a + b if operator == "+" else a - b)}


def write_rows(folder: Path, seed: int = 1) -> None:
    """Writes ``train.jsonl`` and ``test.jsonl`` into ``folder``."""
    folder.mkdir(exist_ok=True)
    for split, rows in build_rows(seed).items():
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write_rows(Path(__file__).parent / "data", *map(int, sys.argv[1:2]))
