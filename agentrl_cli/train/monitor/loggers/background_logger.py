"""A logger that cannot stop or delay training, whatever its server does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from agentrl_cli.log import sanitize
from agentrl_cli.records import Trajectory
from agentrl_cli.train.monitor.trajectory_spans import choose_spread

#: What waits at most for a server that does not answer: metrics and trajectories of 32 steps.
_MAX_WAITING = 64
#: How long the end of a run waits until everything is sent.
_CLOSE_SECONDS = 30.0
_MAX_REASON_CHARS = 300

Warn = Callable[[str], None]


class LoggerSink:
    """Sends to one place, and may fail or hang: its methods run in a thread of their own. What a
    place has no use for is left out."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends metrics of one step; those of an evaluation after it come in a call of their
        own."""

    def log_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Sends trajectories that the step is trained on."""

    def close(self, *, failed: bool) -> None:
        """Sends what is left; ``failed``: the run has ended with an error."""


class BackgroundLogger:
    """Receives the metrics of every step and of evaluations, and trajectories, without waiting; as
    a context manager it closes itself.

    What fails is said once. Later metrics are tried all the same: a server may come back.

    Args:
        name: what messages call it.
        open_sink: connects; called in the thread.
        warn: shows a line to the user; called from any thread.
        remedy: what a user types against a failure.
        max_trajectories: of each step; see :func:`choose_spread`.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], LoggerSink],
        warn: Warn,
        *,
        remedy: str,
        max_trajectories: int = 0,
    ) -> None:
        self._name, self._open_sink, self._warn, self._remedy = name, open_sink, warn, remedy
        self._max_trajectories = max_trajectories
        self._queue: queue.Queue[Callable[[LoggerSink], None]] = queue.Queue(_MAX_WAITING)
        self._has_warned = threading.Event()
        self._is_closed = self._is_useless = False
        self._thread = threading.Thread(target=self._run, name=f"agentrl-{name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.close(failed=error is not None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of one step; those of an evaluation after it come in a call of their
        own."""
        numbers = dict(metrics)
        self._put(lambda sink: sink.log(step, numbers))

    def log_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Records some of the trajectories of a step."""
        chosen = choose_spread(trajectories, self._max_trajectories)
        if chosen:
            self._put(lambda sink: sink.log_trajectories(step, chosen))

    def close(self, *, failed: bool = False) -> None:
        """Waits until everything is sent, but not for long; may be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + _CLOSE_SECONDS

        def end(sink: LoggerSink) -> None:
            sink.close(failed=failed)
            raise _EndedError

        try:
            if not self._is_useless:
                self._queue.put(end, timeout=_CLOSE_SECONDS)
        except queue.Full:
            self._report(f"does not take what waits for it within {_CLOSE_SECONDS:.0f} seconds")
            return
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        if self._thread.is_alive():
            self._report(f"has not taken everything within {_CLOSE_SECONDS:.0f} seconds of the end")

    def _put(self, task: Callable[[LoggerSink], None]) -> None:
        if self._is_useless or self._is_closed:
            return
        try:
            self._queue.put_nowait(task)
        except queue.Full:
            self._report("does not keep up, and what does not fit into its queue is left out")

    def _run(self) -> None:
        try:
            sink = self._open_sink()
        except Exception as error:
            self._is_useless = True
            self._report(_describe(error))
            return
        while True:
            try:
                self._queue.get()(sink)
            except _EndedError:
                return
            except Exception as error:
                self._report(_describe(error))
                if self._is_closed and self._queue.empty():
                    return

    def _report(self, problem: str) -> None:
        if not self._has_warned.is_set():
            self._has_warned.set()
            self._warn(
                sanitize(
                    f"loggers: {self._name}: {problem}. Training goes on, and metrics.jsonl in the "
                    f"run folder has all metrics. {self._remedy}"
                )
            )


class _EndedError(Exception):
    """The sink is closed."""


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())[:_MAX_REASON_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
