"""How commands end: a message and an exit code instead of a traceback, and Ctrl-C.

The first Ctrl-C finishes the step and saves, the second stops at once. A pipe whose reader goes
away ends nothing.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from agentrl_cli.errors import AgentrlError
from agentrl_cli.log import sanitize

#: What shells expect of a command that a signal ended: this plus its number.
_EXIT_SIGNALLED = 128
EXIT_INTERRUPTED = _EXIT_SIGNALLED + signal.SIGINT

_DEBUG = "AGENTRL_DEBUG"


def run_reporting_failures(command: Callable[[], object]) -> int:
    """Runs ``command`` and gives the exit code; whatever it raises becomes a message."""
    code: object = 0
    try:
        command()
    except SystemExit as exit_request:
        code = exit_request.code or 0
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except AgentrlError as error:
        if os.environ.get(_DEBUG):
            traceback.print_exc()
        _say(f"error: {error}")
        return error.exit_code
    except Exception as error:
        _report_unexpected(error)
        return 1
    if code == EXIT_INTERRUPTED:
        _say("stopped by Ctrl-C")
    return code if isinstance(code, int) else 1


class _Pipe(io.FileIO):
    """A standard stream that writes nowhere once nobody reads it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def outlive_readers() -> None:
    """Lets the command do its work to the end when ``| head`` has read enough.

    What it does is in the run folder, and its exit code says how that went.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__") or stream is None or stream.isatty():
            continue
        stream.flush()
        raw = io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False))
        setattr(
            sys,
            name,
            io.TextIOWrapper(
                raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering
            ),
        )


@contextmanager
def crashes_logged(open_log: Callable[[], AbstractContextManager[Path]]) -> Iterator[None]:
    """Writes the traceback of an unexpected exception to the run's log, and lets it propagate."""
    try:
        yield
    except AgentrlError:
        raise
    except Exception as error:
        from agentrl_cli.log import file_log, get_logger
        from agentrl_cli.store.layout import describe

        try:
            with open_log() as path, file_log(path):
                # In the message, not as exc_info: only messages are searched for secrets.
                get_logger(__name__).error("%s", traceback.format_exc())
        except (OSError, AgentrlError) as log_error:
            error.add_note(f"(its traceback could not be written to the run's log: {log_error})")
            raise error from None
        error.add_note(f"The full traceback is in {describe(path)}")
        raise


def _report_unexpected(error: Exception) -> None:
    if os.environ.get(_DEBUG):
        traceback.print_exception(error)
        return
    notes = getattr(error, "__notes__", [])
    logged = " ".join(notes) or f"Set {_DEBUG}=1 and type the command again to see where."
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    _say(
        f"error: unexpected {type(error).__name__}: {error}{place}\n"
        f"This is a bug in agentrl, or in code it called. {logged}"
    )


def _say(text: str) -> None:
    print(sanitize(text), file=sys.stderr, flush=True)


#: SIGTERM is what a cluster's scheduler sends before it kills.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_DRAINING = "stopping: a step in progress is finished and saved, then the run ends"
_AGAIN = " (Ctrl-C again stops at once; what is saved stays)"


class StopRequest(threading.Event):
    """Set by the first signal to stop."""

    exit_code = 0
    """Of a command that stops for it before it is done."""


@contextmanager
def stop_on_signals(
    on_first: Callable[[str], None], on_second: Literal["interrupt", "wait"] = "interrupt"
) -> Iterator[StopRequest]:
    """An event that the first SIGINT or SIGTERM sets; a second raises KeyboardInterrupt, or changes
    nothing.

    ``on_first`` gets the text to show. Inside the block only; handlers are put back.
    """
    stop = StopRequest()
    text = _DRAINING + (_AGAIN if on_second == "interrupt" else "")

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            if on_second == "wait":
                return
            raise KeyboardInterrupt
        stop.exit_code = _EXIT_SIGNALLED + number
        stop.set()
        # From a thread of its own: the signal may have come while this one held the
        # display's lock, which would then never be free.
        threading.Thread(target=on_first, args=(text,), daemon=True).start()

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
