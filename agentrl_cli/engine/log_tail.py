"""The last lines of a process's log, for the message that says that it failed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

#: Enough for long lines of a traceback, little enough to read while an event loop waits.
_MAX_BYTES = 16_384


def read_log_tail(path: str | Path | None, *, num_lines: int = 10, keys: Iterable[str] = ()) -> str:
    """The last ``num_lines`` lines of a log file; "" if it is unknown, missing or empty.

    Args:
        path: the file; None: unknown.
        num_lines: most lines to return; empty ones are skipped.
        keys: secrets, replaced by ``***`` wherever they stand.
    """
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    for key in keys:
        if key:
            text = text.replace(key, "***")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def format_log_tail(
    path: str | Path | None, *, num_lines: int = 10, keys: Iterable[str] = ()
) -> str:
    """A clause with the log's last lines to append to a message; "" where there are none."""
    tail = read_log_tail(path, num_lines=num_lines, keys=keys)
    if not tail:
        return ""
    indented = "\n".join(f"  {line}" for line in tail.splitlines())
    return f"\nlast lines of {path}:\n{indented}"
