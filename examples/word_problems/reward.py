"""Whether the last number of a reply is right, and whether it stands where it was asked for."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d+")
_LAST_LINE = re.compile(r"####\s*-?\d+\s*$")


def score(completions: str, answer: str) -> dict[str, float]:
    """The reward and its parts. The format alone earns nothing: a model that is paid for it learns
    to write any number after ``####``, and no longer calculates."""
    numbers = _NUMBER.findall(completions)
    is_right = float(bool(numbers) and numbers[-1] == answer)
    has_format = float(_LAST_LINE.search(completions) is not None)
    return {"reward": is_right * (1 + has_format) / 2, "format": has_format, "accuracy": is_right}
