"""What an answer is worth."""

from __future__ import annotations

import re


def score(completions: str, answer: str) -> float:
    """1.0 where the last number of the agent's answer is the right one, else 0.0.

    By name it may also ask for ``messages`` (the whole conversation) and for any other field of
    the row. It may return a dict such as ``{"reward": 0.7, "accuracy": 1.0}``: its other parts
    become metrics.
    """
    numbers = re.findall(r"-?\d+", completions or "")
    return float(bool(numbers) and numbers[-1] == answer)
