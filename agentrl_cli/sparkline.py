"""A row of bars for numbers in their order, as terminals show it."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def format_sparkline(
    values: Sequence[float], width: int = 40, bounds: tuple[float, float] | None = None
) -> str:
    """Bars from 0 to 1, or as far as the values go beyond; a space where a value is missing.
    ``bounds`` are of another scale, which several share.

    On a fixed scale, noise looks as small as it is, and two runs can be compared.
    More values than ``width`` are averaged into ``width`` bars.
    """
    num_bars = min(width, len(values))
    shown = []
    for index in range(num_bars):
        part = values[index * len(values) // num_bars : (index + 1) * len(values) // num_bars]
        finite = [value for value in part if math.isfinite(value)]
        shown.append(math.fsum(finite) / len(finite) if finite else math.nan)
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = bounds or (min(0.0, *finite), max(1.0, *finite))
    bars = ""
    for value in shown:
        height = int((value - low) / (high - low) * len(_BARS)) if math.isfinite(value) else 0
        bars += _BARS[min(height, len(_BARS) - 1)] if math.isfinite(value) else " "
    return bars
