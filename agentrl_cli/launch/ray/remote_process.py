"""A process of a run on a node of the cluster: an actor runs it, as a command does on one machine.

The process is the same, with the same log and under the same reaper. Ray carries what goes through
its socket, and its log, which is copied into the run folder as it grows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from agentrl_cli.errors import EngineError
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.managed_process import (
    LOST_STATUS,
    describe_status,
    start_with_socket,
)
from agentrl_cli.log import get_logger
from agentrl_cli.scratch_folders import ScratchFolder

_log = get_logger(__name__)

_THREADS = "OMP_NUM_THREADS"
_POLL_SECONDS = 0.1
#: After so long without news an actor answers that there are none.
_NEWS_SECONDS = 5.0
#: An actor that says nothing for so long is gone, whatever Ray knows of its node.
_SILENCE_SECONDS = 90.0
_CHUNK_BYTES = 2**20
_RETRY_SECONDS = 2.0
_MAX_REASON_CHARS = 300


class ProcessActor:
    """Runs one process on the node where Ray has placed this actor."""

    async def start(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        """Starts it; this interpreter takes the place of its first word.

        Raises:
            EngineError: the operating system starts no more processes.
        """
        # Ray's own: a process that computes chooses for itself, where the user has not.
        os.environ.pop(_THREADS, None)
        self._folder = ScratchFolder("process")
        planned = PlannedProcess(
            name=name, role="trainer", argv=(sys.executable, *argv[1:]), env=env
        )
        # From this thread, which lives as long as the actor: the reaper ends with it.
        self._process, self._end = start_with_socket(planned, self._folder.path / f"{name}.log")
        self._end.setblocking(False)

    async def follow(self, offset: int) -> tuple[bytes, int | None]:
        """What the log has from ``offset`` on, and the exit status when that is all of it."""
        deadline = time.monotonic() + _NEWS_SECONDS
        while True:
            status = self._process.poll()
            chunk = read_from(self._process.log_path, offset)
            if chunk or status is not None or time.monotonic() > deadline:
                return chunk, None if chunk else status
            await asyncio.sleep(_POLL_SECONDS)

    async def read(self) -> bytes:
        """What the process has written to its socket; nothing once it has ended."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._end, _CHUNK_BYTES)
        except OSError:
            return b""

    async def write(self, content: bytes) -> None:
        """Writes to its socket; nothing: there will be no more."""
        with suppress(OSError):
            if content:
                await asyncio.get_running_loop().sock_sendall(self._end, content)
            else:
                self._end.shutdown(socket.SHUT_WR)

    async def terminate(self) -> None:
        """Asks it to end."""
        self._process.terminate()

    async def kill(self) -> None:
        """Ends it and all that it started."""
        self._process.kill()

    async def close(self) -> None:
        """Ends the actor too."""
        self._process.stop(term_seconds=0)
        self._folder.close()
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def find_own_host() -> str:
    """The address at which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def describe_loss(error: Exception) -> str:
    """Why an actor is gone, in a clause."""
    text = " ".join(str(error).split())
    if "node has died" in text:
        return "its node died"
    if isinstance(error, ActorUnavailableError):
        return "its node, or its actor there, does not answer"
    return text[:_MAX_REASON_CHARS]


def read_from(path: Path, offset: int) -> bytes:
    """At most a megabyte of a file, from ``offset`` on."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_CHUNK_BYTES)


class RemoteProcess:
    """A process in an actor, seen from here; see :class:`ManagedProcess`. Started when made.

    Args:
        planned: the process.
        log_path: gets a copy of its log.
        options: of the actor: what it needs of its node, and where it may be.
        start_seconds: how long Ray may take to place and start it.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        log_path: Path,
        *,
        options: Mapping[str, Any],
        start_seconds: float,
    ) -> None:
        self.name = planned.name
        self.log_path = log_path
        log_path.touch(0o600)
        self._log_start = log_path.stat().st_size
        self._planned = planned
        self._options = options
        self._start_seconds = start_seconds
        self._actor: Any = None
        self._has_started = threading.Event()
        self._status: int | None = None
        self._lost: str | None = None
        self._has_ended = threading.Event()
        self._is_wanted = True
        self._run(self._follow)

    def connect(self) -> socket.socket:
        """A socket at whose other end the process is."""
        ours, theirs = socket.socketpair()
        self._run(self._carry_out, theirs)
        self._run(self._carry_in, theirs)
        return ours

    def poll(self) -> int | None:
        """The exit status; None while it runs. One that was lost counts as killed."""
        return self._status

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit status; None if it still runs after that time."""
        self._has_ended.wait(timeout_seconds)
        return self._status

    def terminate(self) -> None:
        """Asks it to end."""
        self._send("terminate")

    def kill(self) -> None:
        """Ends it and all that it started, at once."""
        self._send("kill")

    def stop(self, *, term_seconds: float = 15.0, kill_seconds: float = 10.0) -> int | None:
        """Asks it to end, then kills it; its exit status, None if it cannot be killed."""
        self._is_wanted = False
        for send, seconds in ((self.terminate, term_seconds), (self.kill, kill_seconds)):
            if self._status is None and seconds > 0:
                send()
                self.wait(seconds)
        # Also where its node does not answer; the process ends with its actor.
        if self._actor is not None:
            ray.kill(self._actor)
        return self.wait(kill_seconds)

    def describe_end(self) -> str:
        """How it ended, for a person."""
        if self._lost is not None:
            return f"was lost: {self._lost}"
        return "cannot be killed" if self._status is None else describe_status(self._status)

    def read_log(self) -> str:
        """What the log has got since the start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode("utf-8", errors="replace")

    def _run(self, work: Callable[..., None], *given: Any) -> None:
        threading.Thread(target=work, args=given, name=f"agentrl-{self.name}", daemon=True).start()

    def _send(self, method: str) -> None:
        if self._status is None and self._actor is not None:
            getattr(self._actor, method).remote()

    def _follow(self) -> None:
        offset = 0
        try:
            self._start()
            self._has_started.set()
            while self._status is None:
                following = self._actor.follow.remote(offset)
                chunk, self._status = ray.get(following, timeout=_SILENCE_SECONDS)
                with self.log_path.open("ab") as log:
                    log.write(chunk)
                offset += len(chunk)
            self._actor.close.remote()
        except GetTimeoutError:
            self._lose(f"its node has been silent for {_SILENCE_SECONDS:g} s")
        except (RayError, EngineError, OSError) as error:
            self._lose(describe_loss(error))
        finally:
            self._has_started.set()
            self._has_ended.set()

    def _start(self) -> None:
        """Returns when it runs. Room on a node that was lost is found elsewhere after a while.

        Raises:
            EngineError: there was none in time.
        """
        deadline = time.monotonic() + self._start_seconds
        env = {name: os.environ[name] for name in (_THREADS,) if name in os.environ}
        env |= self._planned.env
        reason = "the cluster has no room for it"
        while self._is_wanted and (left := deadline - time.monotonic()) > 0:
            self._actor = ray.remote(ProcessActor).options(**self._options).remote()
            starting = self._actor.start.remote(self.name, list(self._planned.argv), env)
            try:
                ray.get(starting, timeout=left)
                return
            except GetTimeoutError:
                ray.kill(self._actor)
            except RayActorError as error:
                reason = describe_loss(error)
                time.sleep(_RETRY_SECONDS)
        raise EngineError(
            f"it could not be started within {self._start_seconds:g} s "
            f"(launcher.placement_timeout_seconds): {reason}"
        )

    def _lose(self, reason: str) -> None:
        _log.warning("%s is lost: %s", self.name, reason)
        self._lost, self._status = reason, LOST_STATUS
        if self._actor is not None:
            ray.kill(self._actor)

    def _wait_until_started(self) -> None:
        self._has_started.wait()
        if self._lost is not None:
            raise OSError(self._lost)

    def _carry_out(self, end: socket.socket) -> None:
        """What is written here, to the process, until there is no more."""
        with suppress(OSError, RayError):
            self._wait_until_started()
            while True:
                content = end.recv(_CHUNK_BYTES)
                ray.get(self._actor.write.remote(content))
                if not content:
                    return

    def _carry_in(self, end: socket.socket) -> None:
        """What the process writes, to here; closes the socket at its end."""
        with end, suppress(OSError, RayError):
            self._wait_until_started()
            while content := ray.get(self._actor.read.remote()):
                end.sendall(content)
            end.shutdown(socket.SHUT_WR)
