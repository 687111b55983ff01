"""Games with numbers from 1 to 16, 24 or 32, of which a hash holds some out."""

from __future__ import annotations

import math
from typing import Any

from examples.word_lists import is_held_out

_RANGES = (16, 24, 32)


def build_rows(split: str = "train") -> list[dict[str, Any]]:
    """The rows of ``train`` or ``test``; they share no game."""
    return [
        {"secret": secret, "highest": highest, "max_guesses": math.ceil(math.log2(highest)) + 1}
        for highest in _RANGES
        for secret in range(1, highest + 1)
        if is_held_out([str(highest), str(secret)], one_in=4) == (split == "test")
    ]
