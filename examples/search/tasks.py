"""Questions of one hop (a person's city) and of two (the city's country).

The people of the test questions occur in no training question, only in the library.
"""

from __future__ import annotations

import random
from typing import Any

from examples.search.corpus import list_cities, list_people, list_texts
from examples.word_lists import is_held_out


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; each has the texts that its answer follows from,
    and queries that find them."""
    texts, cities = list_texts(), list_cities()
    rows = []
    for name, city in list_people().items():
        if is_held_out([name], one_in=5) != (split == "test"):
            continue
        birth = next(text for text in texts if text.startswith(f"{name} "))
        place = next(text for text in texts if text.startswith(f"{city} "))
        rows += [
            {
                "question": f"In which city was {name} born?",
                "answer": city,
                "evidence": [birth],
                "queries": [name],
            },
            {
                "question": f"In which country was {name} born?",
                "answer": cities[city],
                "evidence": [birth, place],
                "queries": [name, city],
            },
        ]
    random.Random(f"search {split}").shuffle(rows)
    return rows
