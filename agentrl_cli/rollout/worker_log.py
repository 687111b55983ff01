"""What workers write: copied to one log, the last lines of each remembered."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from agentrl_cli.log import mask_keys

_MAX_LINE_BYTES = 4096
_NUM_TAIL_LINES = 30
#: Of one trajectory. An agent that prints in an endless loop would fill the disk for all.
_MAX_LOGGED_BYTES = 4 * 2**20
#: What is written before there is a log waits for it, up to so many bytes.
_MAX_WAITING_BYTES = 2**20


class _Lines:
    """The output of one worker, cut into lines."""

    def __init__(self) -> None:
        self.label = ""
        self.rest = b""
        self.num_logged_bytes = 0
        self.tail: deque[str] = deque(maxlen=_NUM_TAIL_LINES)


class WorkerLog:
    """One log for all workers; every line says whose trajectory it is from.

    Attributes:
        error: why the log cannot be written; None: it can.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self._descriptor: int | None = None
        self._waiting = bytearray()
        self._lines: dict[int, _Lines] = {}

    def open(self, path: Path) -> None:
        """Writes to ``path`` from now on, after what is there."""
        self.close()
        try:
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            self.error = f"{path}: {error.strerror}"
            return
        waiting, self._waiting = bytes(self._waiting), bytearray()
        self._append(waiting)

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def label(self, worker: int, label: str) -> None:
        """Says what a worker does from now on; its last lines are forgotten."""
        lines = self._find(worker)
        self._end_line(lines)
        lines.label = label
        lines.num_logged_bytes = 0
        lines.tail.clear()

    def write(self, worker: int, piece: bytes) -> None:
        """Takes in what a worker has written."""
        lines = self._find(worker)
        *whole, lines.rest = (lines.rest + piece).split(b"\n")
        text = b"".join(self._format(lines, line) for line in whole)
        if len(lines.rest) > _MAX_LINE_BYTES:
            text += self._format(lines, lines.rest)
            lines.rest = b""
        self._append(text)

    def forget(self, worker: int) -> list[str]:
        """The last lines of a worker that has ended."""
        lines = self._lines.pop(worker, _Lines())
        self._end_line(lines)
        return list(lines.tail)

    def _find(self, worker: int) -> _Lines:
        return self._lines.setdefault(worker, _Lines())

    def _end_line(self, lines: _Lines) -> None:
        if lines.rest:
            self._append(self._format(lines, lines.rest))
            lines.rest = b""

    def _format(self, lines: _Lines, line: bytes) -> bytes:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip("\r")
        text = mask_keys(text)
        lines.tail.append(text)
        if lines.num_logged_bytes > _MAX_LOGGED_BYTES:
            return b""
        lines.num_logged_bytes += len(line)
        if lines.num_logged_bytes > _MAX_LOGGED_BYTES:
            text = f"(what it wrote after {_MAX_LOGGED_BYTES >> 20} MiB is not kept)"
        return f"{lines.label or 'agent worker'} | {text}\n".encode()

    def _append(self, text: bytes) -> None:
        if self._descriptor is None:
            if len(self._waiting) + len(text) <= _MAX_WAITING_BYTES:
                self._waiting += text
            return
        try:
            while text:
                text = text[os.write(self._descriptor, text) :]
        except OSError as error:
            # Agents go on when the disk is full; what trains will say so.
            self.error = f"the log of the agents' workers: {error.strerror}"
            self.close()
