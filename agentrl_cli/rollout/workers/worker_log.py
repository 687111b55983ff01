"""What agents print in worker processes: copied to one log, the last lines remembered."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

from agentrl_cli.log import get_logger, mask_keys

_log = get_logger(__name__)

_MAX_LINE_BYTES = 4096
_NUM_QUOTED_LINES = 30
#: Of one trajectory. An agent that prints in an endless loop would fill the disk for all.
_MAX_LOGGED_BYTES = 4 * 2**20
#: What is written before the log is opened is held back, up to so many bytes.
_MAX_PENDING_BYTES = 2**20


class WorkerLog:
    """One log for all workers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._pending = bytearray()

    def open(self, path: Path) -> None:
        """Writes to ``path`` from now on, after what is there."""
        self.close()
        try:
            file = path.open("ab", buffering=0)
        except OSError as error:
            _log.warning("what agents print is not logged: %s: %s", path, error.strerror)
            return
        with self._lock:
            self._file = file
        self.append(bytes(self._pending))
        self._pending.clear()

    def append(self, text: bytes) -> None:
        """Writes whole lines."""
        with self._lock:
            if self._file is None:
                if len(self._pending) + len(text) <= _MAX_PENDING_BYTES:
                    self._pending += text
                return
            try:
                while text:
                    text = text[self._file.write(text) :]
            except OSError as error:
                # Agents continue when the disk is full; what trains will say so.
                _log.warning("what agents print is no longer logged: %s", error.strerror)
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Closes the file; may be called twice."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None


class WorkerOutput:
    """What one worker writes, cut into lines that name their trajectory. Thread-safe."""

    def __init__(self, log: WorkerLog) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._label = ""
        self._rest = b""
        self._num_logged_bytes = 0
        self._last_lines: deque[str] = deque(maxlen=_NUM_QUOTED_LINES)

    def begin(self, label: str) -> None:
        """Names the trajectory that the worker runs from now on; forgets its last lines."""
        self.end_line()
        with self._lock:
            self._label = label
            self._num_logged_bytes = 0
            self._last_lines.clear()

    def write(self, piece: bytes) -> None:
        """Takes what the worker has written."""
        with self._lock:
            *lines, self._rest = (self._rest + piece).split(b"\n")
            text = b"".join(map(self._format, lines))
            if len(self._rest) > _MAX_LINE_BYTES:
                text += self._format(self._rest)
                self._rest = b""
            self._log.append(text)

    def end_line(self) -> None:
        """Ends the last line, if it has no end of its own."""
        with self._lock:
            if self._rest:
                self._log.append(self._format(self._rest))
                self._rest = b""

    def quote(self) -> str:
        """A clause with the last lines; empty if there are none."""
        with self._lock:
            lines = list(self._last_lines)
        if not lines:
            return ""
        return "\nThe last lines that it wrote:\n" + "\n".join(f"  | {line}" for line in lines)

    def _format(self, line: bytes) -> bytes:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip("\r")
        text = mask_keys(text)
        self._last_lines.append(text)
        if self._num_logged_bytes > _MAX_LOGGED_BYTES:
            return b""
        self._num_logged_bytes += len(line)
        if self._num_logged_bytes > _MAX_LOGGED_BYTES:
            text = f"(what it wrote after {_MAX_LOGGED_BYTES >> 20} MiB is not kept)"
        return f"{self._label or 'agent worker'} | {text}\n".encode()
