"""``metrics.jsonl``: one line a step, appended and flushed; a torn last line does no harm."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from agentrl_cli.store.atomic_files import append_whole, store_errors, write_text

#: What the metrics of alarms begin with: ``alarm_<name>`` is 1 in the steps in which it is active.
ALARM_PREFIX = "alarm_"


def list_alarms(metrics: Mapping[str, float]) -> list[str]:
    """The alarms that are active in a step, by its metrics."""
    return [
        name.removeprefix(ALARM_PREFIX)
        for name, value in metrics.items()
        if name.startswith(ALARM_PREFIX) and value == 1.0
    ]


def append_line(path: Path, metrics: Mapping[str, float]) -> None:
    """Adds one line, on disk when this returns; a line that does not fit is removed.

    Raises:
        StoreError: the disk is full, or the file cannot be written to.
    """
    with store_errors(path), path.open("ab", buffering=0) as file:
        append_whole(file, _format_line(metrics))
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, float]]:
    """Every complete line, in order; numbers that were not finite come back as NaN."""
    if not path.is_file():
        return []
    with store_errors(path, "read"):
        text = path.read_text(encoding="utf-8", errors="replace")
    lines = []
    for line in text.splitlines():
        try:
            data = json.loads(line)
        except ValueError:
            # The line that a killed process was writing.
            continue
        if isinstance(data, dict):
            lines.append({k: math.nan if v is None else v for k, v in data.items()})
    return lines


def truncate_lines(path: Path, last_step: int) -> None:
    """Drops the lines of steps after ``last_step``, and torn ones."""
    if path.is_file():
        kept = [m for m in read_lines(path) if m.get("step", 0) <= last_step]
        write_text(path, b"".join(_format_line(m) for m in kept).decode())


def truncate_torn_line(path: Path) -> None:
    """Removes a last line that has no end, so that the next one begins on its own."""
    if path.is_file():
        with store_errors(path), path.open("r+b") as file:
            data = file.read()
            end = data.rfind(b"\n") + 1
            if end != len(data):
                file.truncate(end)


def _format_line(metrics: Mapping[str, float]) -> bytes:
    # JSON has no NaN and no infinity, and strict readers refuse what Python writes for them.
    finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    return (json.dumps(finite) + "\n").encode()
