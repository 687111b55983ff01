"""Ctrl-C: the first finishes the step and saves, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

#: Also what a cluster's scheduler sends before it kills.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

DRAINING = (
    "stopping: a step in progress is finished and saved, then the run ends "
    "(Ctrl-C again stops at once; what is saved stays)"
)


class StopRequest:
    """Whether a person has asked the run to end; read from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Asks the run to end after the step in progress."""
        self._event.set()

    def is_set(self) -> bool:
        """True once the run has been asked to end."""
        return self._event.is_set()


@contextmanager
def stop_on_signals(on_first: Callable[[str], None]) -> Iterator[StopRequest]:
    """A request that the first SIGINT or SIGTERM sets; a second raises KeyboardInterrupt.

    ``on_first`` gets the text to show. Inside the block only; handlers are put back.
    """
    stop = StopRequest()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        # From a thread of its own: the signal may have come while this one held the
        # display's lock, which would then never be free.
        threading.Thread(target=on_first, args=(DRAINING,), daemon=True).start()

    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may set handlers; without them Ctrl-C stops at once.
        yield stop
        return
    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
