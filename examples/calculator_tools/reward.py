"""Whether the answer is right, and whether the tool did the work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_CALL_SHARE = 0.3


def score(completions: str, answer: str, messages: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The reward and its parts: a share for a call that the tool could carry out, the rest for the
    right number at the end."""
    results = [m["content"] for m in messages if m["role"] == "tool"]
    has_result = float(any(str(result).lstrip("-").isdigit() for result in results))
    numbers = re.findall(r"-?\d+", completions.replace(",", ""))
    is_right = float(bool(numbers) and numbers[-1] == answer)
    reward = _CALL_SHARE * has_result + (1 - _CALL_SHARE) * is_right
    return {"reward": reward, "tool_result": has_result, "accuracy": is_right}
