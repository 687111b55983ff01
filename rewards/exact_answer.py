"""Reward for questions whose answer is one number."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

#: Thousands may be parted by commas; a minus right after a digit or a bracket is an operator.
_NUMBER = re.compile(r"(?:(?<![\d)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def exact_answer_reward_fn(completions: Any, answer: Any, **kwargs: Any) -> float:  # noqa: ARG001
    """1.0 when the last number in ``completions`` equals ``answer`` exactly, else 0.0."""
    said = _last_number(completions)
    return float(said is not None and said == _last_number(answer))


def _last_number(text: Any) -> Decimal | None:
    """The last number in anything that can be text; None: there is none."""
    found = _NUMBER.findall("" if text is None else str(text))
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None
