"""One process of a run: started under a process reaper, logged to a file, ended for certain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentrl_cli.errors import EngineError
from agentrl_cli.process_reaper import KILL_SIGNAL, build_reaper_command, kill_group

if TYPE_CHECKING:
    from agentrl_cli.launch.plan import PlannedProcess

#: The exit status of a process that was lost with its machine.
LOST_STATUS = 1000

_POLL_SECONDS = 0.02
#: Enough for a Python traceback through a server's many layers.
_MAX_LOG_BYTES = 256 * 1024


class Process(Protocol):
    """A process of a run, wherever it is: the methods of :class:`ManagedProcess`."""

    name: str
    log_path: Path

    def poll(self) -> int | None: ...
    def wait(self, timeout_seconds: float) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def stop(self, *, term_seconds: float = ..., kill_seconds: float = ...) -> int | None: ...
    def describe_end(self) -> str: ...
    def read_log(self) -> str: ...


#: Starts a planned process with a log. The descriptor of a socket is its last argument; the other
#: end of that socket is returned. Raises EngineError: it cannot be started.
StartProcess = Callable[["PlannedProcess", Path], tuple[Process, socket.socket]]


class ManagedProcess:
    """A command that runs at most once at a time and leaves nothing behind. Thread-safe.

    Args:
        name: what the log's header and errors call it.
        argv: the command.
        env: added to ``base_env``.
        log_path: gets what the command writes, after what is there already.
        base_env: the environment otherwise; None: that of this process.
        pass_fds: file descriptors that the command inherits.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        *,
        base_env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log_path = log_path
        self._env = {**(os.environ if base_env is None else base_env), **env}
        self._pass_fds = tuple(pass_fds)
        self._lock = threading.Lock()
        self._reaper: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts the command, which does not run; a header line in the log says when.

        Raises:
            EngineError: no process can be started, or the log file cannot be written.
        """
        with self._lock:
            try:
                self.log_path.touch(0o600)
                with self.log_path.open("ab") as log:
                    self._log_start = log.seek(0, os.SEEK_END)
                    started = datetime.now().astimezone().isoformat(timespec="seconds")
                    log.write(f"=== {self.name} starts, {started}\n".encode())
                    log.flush()
                    self._reaper = subprocess.Popen(
                        build_reaper_command(self.argv),
                        env=self._env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        pass_fds=self._pass_fds,
                    )
            except OSError as error:
                raise EngineError(f"{self.name} cannot be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Process id of the reaper, the parent of the command; None before the first start."""
        return self._reaper.pid if self._reaper is not None else None

    def poll(self) -> int | None:
        """The exit status (128 + the signal's number where one ended it); None while it runs.

        When there is one, everything that the command started has ended too.
        """
        with self._lock:
            return self._poll()

    def _poll(self) -> int | None:
        reaper = self._reaper
        if reaper is None:
            raise RuntimeError(f"{self.name} has not been started")
        if reaper.returncode is None:
            if not _has_ended(reaper):
                return None
            # The reaper may have been killed itself. Until it is reaped its id means its group
            # and no other.
            kill_group(reaper.pid)
            reaper.wait()
        code = reaper.returncode
        return code if code >= 0 else 128 - code

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit status; None if it still runs after that time."""
        deadline = time.monotonic() + timeout_seconds
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return status

    def terminate(self) -> None:
        """Asks the command to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the command and all that it started, at once."""
        self._signal(KILL_SIGNAL)

    def _signal(self, number: int) -> None:
        with self._lock:
            if self._reaper is not None and self._poll() is None:
                os.kill(self._reaper.pid, number)

    def stop(self, *, term_seconds: float = 15.0, kill_seconds: float = 10.0) -> int | None:
        """Ends the command: asks it first, then kills it and all that it started.

        Returns:
            The exit status; None if it was never started, or cannot be killed.
        """
        if self._reaper is None:
            return None
        self.terminate()
        if (status := self.wait(term_seconds)) is not None:
            return status
        self.kill()
        if (status := self.wait(kill_seconds)) is not None:
            return status
        # The reaper itself does not answer.
        kill_group(self._reaper.pid)
        return self.wait(kill_seconds)

    def describe_end(self) -> str:
        """How it ended, for a person: ``was killed by SIGKILL``."""
        status = self.poll()
        return "cannot be killed" if status is None else describe_status(status)

    def read_log(self) -> str:
        """What the log has got since the last start, its header first (the end, if it is long)."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _MAX_LOG_BYTES))
                return log.read().decode("utf-8", errors="replace")
        except OSError as error:
            return f"(the log {self.log_path} cannot be read: {error})"


def start_with_socket(
    planned: PlannedProcess, log_path: Path
) -> tuple[ManagedProcess, socket.socket]:
    """Starts it as a child of this process; see :data:`StartProcess`."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            argv = [*planned.argv, str(theirs.fileno())]
            fds = (theirs.fileno(),)
            process = ManagedProcess(planned.name, argv, planned.env, log_path, pass_fds=fds)
            process.start()
    except BaseException:
        ours.close()
        raise
    return process, ours


def describe_status(status: int) -> str:
    """How a process ended, for a person: ``was killed by SIGKILL``."""
    if status > 128:
        # A program may end with any number.
        with suppress(ValueError):
            return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
