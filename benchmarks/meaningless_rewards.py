"""Negative controls of benchmarks/real_models.py: rewards that say nothing of the reply.

A policy that is trained on them drifts, and must gain no skill. Its held-out tasks are marked, and
scored as the example itself scores them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from examples.reverse_text.reward import similarity
from examples.reverse_text.tasks import build_rows as build_reverse_text
from examples.word_problems.reward import score as score_word_problem
from examples.word_problems.tasks import build_rows as build_word_problems

#: How many rewards the shuffled ones are drawn from: of eight steps, so that what a reply earns has
#: nothing to do with when it ended. Short ones end first.
_NUM_REMEMBERED = 512


def _mark(build_rows: Callable[[str], list[dict[str, Any]]]) -> Callable[..., list[dict[str, Any]]]:
    def build(split: str) -> list[dict[str, Any]]:
        return [{**row, "is_held_out": True} for row in build_rows(split)]

    return build


def reverse_text_random(completions: str, answer: str, is_held_out: bool = False) -> float:
    """A number from 0 to 1, by chance."""
    return similarity(completions, answer) if is_held_out else random.random()


_earned: deque[float] = deque(maxlen=_NUM_REMEMBERED)


def word_problems_shuffled(
    completions: str, answer: str, is_held_out: bool = False
) -> float | dict[str, float]:
    """The reward of one of the replies that were judged before: credit goes to wrong ones."""
    own = score_word_problem(completions, answer)
    if is_held_out:
        return own
    drawn = random.choice(_earned) if _earned else 0.0
    _earned.append(own["reward"])
    return drawn


reverse_text_held_out = _mark(build_reverse_text)
word_problems_held_out = _mark(build_word_problems)
