"""Numbers as one line of small bars."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def format_sparkline(values: Sequence[float], width: int = 40) -> str:
    """Bars from the smallest to the largest value; a space where a value is missing.

    More values than ``width`` are averaged into ``width`` bars.
    """
    shown = _shrink(values, width)
    finite = [v for v in shown if math.isfinite(v)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    bars = []
    for value in shown:
        if not math.isfinite(value):
            bars.append(" ")
        elif span == 0:
            bars.append(_BARS[3])
        else:
            bars.append(_BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)])
    return "".join(bars)


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    parts = []
    for index in range(width):
        part = values[index * len(values) // width : (index + 1) * len(values) // width]
        finite = [v for v in part if math.isfinite(v)]
        parts.append(math.fsum(finite) / len(finite) if finite else math.nan)
    return parts
