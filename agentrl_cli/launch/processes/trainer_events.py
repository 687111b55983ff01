"""What a trainer process reports to the command that started it: one JSON line an event."""

from __future__ import annotations

import json
import os
import queue
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentrl_cli.errors import AgentrlError, build_error
from agentrl_cli.log import Observer, get_logger

_log = get_logger(__name__)

#: Maximum number of events that are queued while the reader is busy; a display needs no more.
_MAX_QUEUED = 1000
#: How long an event that matters waits for a place in the queue.
_PUT_SECONDS = 1.0
#: How long the last events may take to be written.
_FLUSH_SECONDS = 5.0
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The last event of a trainer, about itself; empty where it was killed."""

    is_complete: bool | None = None
    """Set when it ended well; False: it was asked to stop before the last step."""
    error: AgentrlError | None = None
    """What it failed with: an error raised on purpose, so that trying again does not help."""
    crash: str | None = None
    """What it crashed with: any other exception, and where."""


class TrainerEventWriter:
    """An :class:`~agentrl_cli.log.Observer` that writes every event to a file descriptor.

    The writing happens in a thread, so that a reader which is stopped or gone costs the
    trainer nothing: progress is then dropped, and once the pipe is closed everything is.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED)
        self._is_broken = False
        self._thread = threading.Thread(target=self._write, name="agentrl-events", daemon=True)
        self._thread.start()

    def on_stage(self, stage: str, total: int | None = None) -> None:
        """Sends the stage."""
        self._put({"event": "stage", "stage": stage, "total": total})

    def on_progress(self, num_done: int, note: str = "") -> None:
        """Sends the progress, unless the reader is busy."""
        self._put({"event": "progress", "num_done": num_done, "note": note}, wait=False)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        """Sends the step's metrics."""
        self._put({"event": "step", "metrics": {k: float(v) for k, v in metrics.items()}})

    def on_message(self, text: str) -> None:
        """Sends the text."""
        self._put({"event": "message", "text": text})

    def report(self, report: TrainerReport) -> None:
        """Sends the last event and waits until it is written, for a few seconds."""
        failure = report.error
        self._put(
            {
                "event": "report",
                "is_complete": report.is_complete,
                "crash": report.crash,
                "error": None if failure is None else type(failure).__name__,
                "message": None if failure is None else str(failure),
                "exit_code": None if failure is None else failure.exit_code,
            }
        )
        self.close()

    def close(self) -> None:
        """Writes what is queued, for a few seconds; may be called twice."""
        try:
            self._lines.put(None, timeout=_PUT_SECONDS)
        except queue.Full:
            return
        self._thread.join(_FLUSH_SECONDS)

    def _put(self, event: Mapping[str, Any], *, wait: bool = True) -> None:
        if self._is_broken:
            return
        line = (json.dumps(event) + "\n").encode()
        try:
            self._lines.put(line, block=wait, timeout=_PUT_SECONDS)
        except queue.Full:
            if wait:
                _log.warning("the command does not read; an event was dropped: %s", event["event"])

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                while line and not self._is_broken:
                    line = line[os.write(self._descriptor, line) :]
            except OSError as error:
                _log.warning("the command no longer listens (%s)", error)
                self._is_broken = True


class TrainerEventReader:
    """Forwards a trainer's events to an observer until the trainer's end of the pipe closes.

    Args:
        descriptor: the reading end; closed by :meth:`finish`.
        observer: shows the run to a person.
    """

    def __init__(self, descriptor: int, observer: Observer) -> None:
        self._descriptor = descriptor
        self._observer = observer
        self._ends_at: float | None = None
        self.report = TrainerReport()
        self.num_steps = 0
        """Steps that the trainer has done."""
        self.is_stepping = False
        """True once it has begun a step: it has something to finish."""
        self._thread = threading.Thread(target=self._read, name="agentrl-trainer", daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float = _FLUSH_SECONDS) -> TrainerReport:
        """The report of the trainer, which has ended; events still in the pipe are forwarded first.

        Something that the trainer left behind may hold its end of the pipe open: it is not
        waited for.
        """
        self._ends_at = time.monotonic() + timeout_seconds
        self._thread.join(timeout_seconds + 1.0)
        return self.report

    def _read(self) -> None:
        rest = b""
        try:
            while (data := self._read_some()) is not None:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._forward(line)
        finally:
            os.close(self._descriptor)

    def _read_some(self) -> bytes | None:
        """Bytes, or none yet; None at the end."""
        if select.select([self._descriptor], [], [], 0.1)[0]:
            return os.read(self._descriptor, _READ_BYTES) or None
        ended = self._ends_at is not None and time.monotonic() > self._ends_at
        return None if ended else b""

    def _forward(self, line: bytes) -> None:
        try:
            self._apply(json.loads(line))
        except Exception as error:
            # A torn line, or a terminal that has gone: the trainer's report must still arrive.
            _log.warning("an event of the trainer was not shown (%r): %.200r", error, line)

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "stage":
            self.is_stepping = self.is_stepping or event["stage"] in ("rollout", "train")
            self._observer.on_stage(event["stage"], event["total"])
        elif kind == "progress":
            self._observer.on_progress(event["num_done"], event["note"])
        elif kind == "step":
            self.num_steps += 1
            self._observer.on_step(event["metrics"])
        elif kind == "message":
            self._observer.on_message(event["text"])
        elif kind == "report":
            error = event["error"]
            self.report = TrainerReport(
                is_complete=event["is_complete"],
                error=error and build_error(error, event["message"], event["exit_code"]),
                crash=event["crash"],
            )
        else:
            raise ValueError(f"unknown event {kind!r}")
