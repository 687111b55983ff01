"""The alarms of a run, alarm by alarm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def format_alarms(alarms: Mapping[int, Sequence[str]]) -> list[str]:
    """``alarm truncated rang in steps 3-7, 12``: one line an alarm, the first to ring first.

    Args:
        alarms: the names of those that rang in each step.
    """
    steps: dict[str, list[int]] = {}
    for step, names in sorted(alarms.items()):
        for name in names:
            steps.setdefault(name, []).append(step)
    return [
        f"alarm {name} rang in step{'' if len(found) == 1 else 's'} {format_ranges(found)}"
        for name, found in steps.items()
    ]


def format_ranges(numbers: Sequence[int]) -> str:
    """``3-7, 12`` for ascending numbers."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
