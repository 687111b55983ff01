"""The trainer's side of the host: its process, and what it is told."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from agentrl_cli.errors import BuilderError, RunError, build_error
from agentrl_cli.guard import GUARD_PATH, KILL_SIGNAL
from agentrl_cli.log import get_logger
from agentrl_cli.rollout.worker_channel import Channel, ChannelError, Message
from agentrl_cli.rollout.worker_errors import build_process_error
from agentrl_cli.rollout.worker_host import build_command
from agentrl_cli.rollout.worker_process import MODEL_VARIABLES, AgentSpec

_log = get_logger(__name__)

#: Importing a framework from a cold disk takes a minute; a builder may load something besides.
TRIAL_SECONDS = 600.0
_SEND_SECONDS = 20.0
_END_SECONDS = 5.0
#: What a host leaves in its own log when it cannot start.
_MAX_TAIL_CHARS = 2000


class HostProcess:
    """A host under a guard, so that it ends with this process, and its workers with it.

    Args:
        max_memory_bytes: of one worker; None: no limit.

    Raises:
        RunError: the system starts no more processes.
    """

    def __init__(self, max_memory_bytes: int | None) -> None:
        self._numbers = itertools.count(1)
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        own, others = socket.socketpair()
        with others:
            number = others.fileno()
            limit = str(max_memory_bytes or 0)
            try:
                self._guard = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", str(GUARD_PATH), str(os.getpid())),
                        *build_command("run_host", str(number), limit),
                    ],
                    env=_build_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    start_new_session=True,
                    pass_fds=(number,),
                )
            except OSError as error:
                own.close()
                self._stderr.close()
                raise RunError(f"the host of the agents' workers cannot start: {error}") from error
        own.settimeout(_SEND_SECONDS)
        self._sending = Channel(own)
        self.reports = Channel(own.dup())
        """What the host tells."""

    def start_worker(self) -> tuple[int, Channel]:
        """A worker's number, and the channel to it; it may not have begun yet.

        Raises:
            OSError: the host is gone.
        """
        number = next(self._numbers)
        own, others = socket.socketpair()
        with others:
            try:
                self._sending.send({"op": "start", "worker": number}, [others.fileno()])
            except BaseException:
                own.close()
                raise
        return number, Channel(own)

    def tell(self, op: str, **fields: Any) -> None:
        """Says something to the host, if it is there to hear it."""
        try:
            self._sending.send({"op": op, **fields})
        except OSError as error:
            _log.debug("the host of the workers did not hear %s: %s", op, error)

    def try_agents(self, specs: Sequence[AgentSpec]) -> Message:
        """What the agents are, found out in a worker; blocks until it is known.

        Raises:
            UserInputError: a builder cannot be used; the message is that of a run inline.
            RunError: the host did not start.
        """
        number, channel = self.start_worker()
        try:
            channel.socket.settimeout(TRIAL_SECONDS)
            channel.send({"op": "try", "agents": [asdict(spec) for spec in specs]})
            reply = channel.receive()
        except (TimeoutError, OSError, ChannelError) as error:
            self.tell("kill", worker=number)
            raise self._describe_trial(specs, number, error) from error
        finally:
            channel.close()
        if reply is None:
            raise self._describe_trial(specs, number, None)
        if reply["op"] == "refused":
            raise build_error(reply["error"], reply["message"], BuilderError.exit_code)
        return reply

    def _describe_trial(
        self, specs: Sequence[AgentSpec], number: int, error: Exception | None
    ) -> BuilderError | RunError:
        """The error for a trial without an answer."""
        keys = ", ".join(spec.key for spec in specs)
        where = f"{keys}: while the builder was tried in a process of its own"
        if isinstance(error, TimeoutError):
            return BuilderError(f"{where}, it did not end in {TRIAL_SECONDS:g} seconds")
        ended = self._wait_for_end(number)
        if ended is None and self._guard.poll() is not None:
            return RunError(f"the host of the agents' workers ended: {self.read_stderr()}")
        return BuilderError(f"{where}: {build_process_error(ended, None)}")

    def _wait_for_end(self, number: int) -> Message | None:
        self.reports.socket.settimeout(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                message = self.reports.receive()
            except OSError:
                return None
            if message is None:
                self._wait(_END_SECONDS)
                return None
            if message["op"] == "ended" and message["worker"] == number:
                return message
        return None

    def read_stderr(self) -> str:
        """What the host itself wrote, if anything."""
        self._stderr.seek(0)
        text = self._stderr.read().decode("utf-8", errors="replace").strip()
        return text[-_MAX_TAIL_CHARS:] or "it wrote nothing"

    def log_to(self, path: Path) -> None:
        """What agents print goes to ``path``."""
        self.tell("log", path=str(path.resolve()))

    def close(self) -> None:
        """Ends the host and all workers, whatever they do; may be called twice."""
        self._sending.close()
        self.reports.close()
        if not self._wait(_END_SECONDS):
            self._guard.send_signal(KILL_SIGNAL)
            if not self._wait(_END_SECONDS):
                os.killpg(self._guard.pid, signal.SIGKILL)
                self._guard.wait()
        self._stderr.close()

    def _wait(self, seconds: float) -> bool:
        try:
            self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _build_environment() -> Mapping[str, str]:
    """One thread for each process, and nobody's keys.

    Many processes share the cores, and a library that has started its threads could not be
    forked. One that makes a client when it is imported shall not do so before there is a model:
    without a key it cannot, and is imported by the worker.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    own = {name: value for name, value in os.environ.items() if name not in MODEL_VARIABLES}
    return {**dict.fromkeys(names, "1"), **own}
