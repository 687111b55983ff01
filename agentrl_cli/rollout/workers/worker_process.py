"""One worker process, seen from the trainer: started, given trajectories, and ended."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from agentrl_cli.agents.agent_building import AgentSpec
from agentrl_cli.agents.agent_environment import MODEL_VARIABLES
from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, run_in_thread
from agentrl_cli.errors import UserInputError, build_error
from agentrl_cli.log import get_logger, sanitize
from agentrl_cli.process_channel import Message, encode_message, list_import_path
from agentrl_cli.process_reaper import KILL_SIGNAL, build_reaper_command
from agentrl_cli.records import Boundary, Failure, FailureCause
from agentrl_cli.rollout.rollout_failures import AgentRunError
from agentrl_cli.rollout.workers.worker_program import MAX_MESSAGE_BYTES, REWARD_CALLS

_log = get_logger(__name__)

#: Between SIGKILL and the end of a process and of all that it has started.
_KILL_SECONDS = 10.0
#: A worker that ended has closed its connection a moment before.
_EXIT_SECONDS = 4.0
#: How long a worker that is no longer needed may run what its agents registered for its end.
_RETIRE_SECONDS = 10.0
_PIECE_BYTES = 2**16
_MAX_PIECES = 64
_MAX_LINE_BYTES = 4096
_NUM_QUOTED_LINES = 30
#: Of one trajectory. An agent that prints in an endless loop would fill the disk for all.
_MAX_LOGGED_BYTES = 4 * 2**20
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from agentrl_cli.rollout.workers.worker_program import main; main(int(sys.argv[1]))"
)
_KILLED_HINT = (
    ", and agentrl did not: most often the system ran out of memory. Lower "
    "rollout.subprocess.max_processes, or set rollout.subprocess.max_memory_gib"
)


class AgentProcessError(Exception):
    """The agent's process ended before the agent had."""


class AgentCrashError(AgentProcessError):
    """A signal ended the agent's process."""


class AgentExitError(AgentProcessError):
    """The agent ended its own process."""


class AgentMemoryError(AgentProcessError):
    """The agent took more memory than it may."""


class AgentWorker:
    """A worker process under a process reaper, which leaves nothing of it behind.

    Args:
        log: gets what the process writes.
        max_memory_gib: for messages.
        modules: ``reloaded``: the user's are imported again for every trajectory; or ``kept``.

    Raises:
        OSError: the system starts no further process.
    """

    def __init__(
        self, log: WorkerLog, max_memory_gib: float | None = None, modules: str = "reloaded"
    ) -> None:
        self.pid: int | None = None
        """Its process id, once it is ready."""
        self.num_tasks = 0
        self.memory_bytes: int | None = None
        """What it used when it was killed for using too much."""
        self._max_memory_gib = max_memory_gib
        self._modules = modules
        self._connection, other = multiprocessing.Pipe()
        with other:
            self._reaper = _start(other.fileno())
        self._output = WorkerOutput(log)
        self._reading = threading.Lock()
        self._copying = threading.Thread(
            target=self._copy_output, name="output of an agent worker", daemon=True
        )
        self._copying.start()
        self._ending = threading.Lock()

    @property
    def reaper_pid(self) -> int:
        """The process that everything of this worker descends from."""
        return self._reaper.pid

    @property
    def has_ended(self) -> bool:
        """True when its process is gone."""
        return self._reaper.poll() is not None

    def wait_until_idle(self, timeout_seconds: float) -> bool:
        """Waits until it can be given work; False: its last agent left a process behind. Blocks.

        Raises:
            TimeoutError: it takes too long.
            AgentProcessError: it ended.
        """
        message = self._receive(timeout_seconds)
        # It was written by the trajectory that has ended, and not by the one that comes next.
        self._take_output()
        self.pid = message["pid"]
        return bool(message["is_reusable"])

    def try_agents(self, specs: list[AgentSpec], timeout_seconds: float) -> list[dict[str, Any]]:
        """What the agents are, from building each of them once; blocks.

        Raises:
            UserInputError: a builder cannot be used; the message is that of a run inline.
            TimeoutError: it takes too long.
            AgentProcessError: a builder ended the process.
        """
        request = {"op": "try", "agents": [asdict(spec) for spec in specs]}
        reply = self._ask(request, timeout_seconds)
        if reply["op"] == "refused":
            raise build_error(reply["error"], reply["message"], UserInputError.exit_code)
        return list(reply["agents"])

    def begin(self, label: str) -> None:
        """Names the trajectory that it runs from now on."""
        self._output.begin(label)

    async def run(self, spec: AgentSpec, call: AgentCall) -> AgentOutcome:
        """What the agent ended with. Cancelled, it ends the process first.

        Raises:
            AgentRunError: the agent raised.
            AgentProcessError: the process ended before the agent.
            UserInputError: a mistake that would repeat itself in every trajectory.
        """
        self.num_tasks += 1
        message: Message = {
            "op": "run",
            "agent": asdict(spec),
            "row": dict(call.row),
            "model": call.model,
            "base_url": call.base_url,
            "api_key": call.api_key,
            "max_turns": call.max_turns,
            "modules": self._modules,
        }
        try:
            while True:
                reply = await run_in_thread(partial(self._ask, message), "agent worker")
                if reply["op"] not in REWARD_CALLS:
                    break
                message = _set_reward(reply, call.client)
        except asyncio.CancelledError:
            await run_in_thread(self.end, "ending an agent worker")
            raise
        if reply["op"] == "done":
            return AgentOutcome(final_answer=reply["final_answer"], returned=reply["returned"])
        if reply["op"] == "refused":
            raise build_error(reply["error"], reply["message"], UserInputError.exit_code)
        told = reply["failure"]
        known = {"boundary": Boundary(told["boundary"]), "cause": FailureCause(told["cause"])}
        raise AgentRunError(Failure(**{**told, **known}), reply["refused"])

    def describe_late(self) -> str:
        """A clause for an agent that passed its deadline."""
        return f": its process was killed{self._output.quote()}"

    # -- its end --------------------------------------------------------------------------

    def retire(self) -> None:
        """Lets it end by itself, and ends it after a while; blocks."""
        self._connection.close()
        try:
            self._reaper.wait(_RETIRE_SECONDS)
        except subprocess.TimeoutExpired:
            _log.debug("a worker does not end by itself and is killed")
        self.end()

    def kill(self) -> None:
        """Has it killed with all that it has started; does not wait."""
        # While it is not reaped, its id means this process and no other.
        if self._reaper.poll() is None:
            self._reaper.send_signal(KILL_SIGNAL)

    def end(self) -> None:
        """Kills it and waits until nothing of it is left; may be called twice."""
        self.kill()
        with self._ending:
            try:
                self._reaper.wait(_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._reaper.pid, signal.SIGKILL)
                self._reaper.wait()
            self._copying.join(_EXIT_SECONDS)
            self._connection.close()

    def _describe_end(self) -> AgentProcessError:
        """The error for a process that has ended or closed its connection; ends it."""
        try:
            status = self._reaper.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        self.end()
        tail = self._output.quote()
        if status is None:
            return AgentProcessError(
                "the agent's process was killed: it closed, or wrote to, the connection to the "
                f"trainer, whose file descriptor is not the agent's{tail}"
            )
        if self.memory_bytes is not None:
            return AgentMemoryError(
                f"the agent's process was killed: it used {self.memory_bytes / 2**30:.2f} GiB of "
                f"memory, and rollout.subprocess.max_memory_gib is {self._max_memory_gib:g}{tail}"
            )
        name = _name_signal(status)
        if name is not None:
            hint = _KILLED_HINT if name == "SIGKILL" else ""
            return AgentCrashError(f"the agent's process was killed by {name}{hint}{tail}")
        return AgentExitError(
            f"the agent's process ended itself with exit status {status}, as os._exit({status}) "
            f"does{tail}"
        )

    # -- the connection -------------------------------------------------------------------

    def _ask(self, message: Mapping[str, Any], timeout_seconds: float | None = None) -> Message:
        try:
            self._connection.send_bytes(encode_message(message))
        except OSError:
            raise self._describe_end() from None
        return self._receive(timeout_seconds)

    def _receive(self, timeout_seconds: float | None) -> Message:
        """The next message; raises the process's end when none can come."""
        try:
            if not self._connection.poll(timeout_seconds):
                raise TimeoutError
            message = json.loads(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
            if isinstance(message, dict) and isinstance(message.get("op"), str):
                return message
        except TimeoutError:
            raise
        except (EOFError, OSError, ValueError, RecursionError) as error:
            _log.debug("the connection to an agent worker broke: %r", error)
        raise self._describe_end()

    def _copy_output(self) -> None:
        """Copies what the process writes until nobody is left who could write."""
        assert self._reaper.stdout is not None
        # select() knows no descriptor over 1023.
        ready = select.poll()
        ready.register(self._reaper.stdout, select.POLLIN)
        while ready.poll() and self._take_output():
            pass
        with self._reading:
            self._reaper.stdout.close()
        self._output.end_line()

    def _take_output(self) -> bool:
        """Copies what the process has written so far; False: nobody is left who could write."""
        output = self._reaper.stdout
        with self._reading:
            if output is None or output.closed:
                return False
            ready = select.poll()
            ready.register(output, select.POLLIN)
            # What prints for ever is not waited for.
            for _ in range(_MAX_PIECES):
                if not ready.poll(0):
                    break
                if not (piece := os.read(output.fileno(), _PIECE_BYTES)):
                    return False
                self._output.write(piece)
        return True


def _start(connection: int) -> subprocess.Popen[bytes]:
    """A worker under a reaper of its own."""
    path = json.dumps(list_import_path())
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    # One thread for each process, since many share the cores; and nobody's keys.
    own = {name: value for name, value in os.environ.items() if name not in MODEL_VARIABLES}
    return subprocess.Popen(
        # Unbuffered: what an agent printed last is not lost with its process.
        build_reaper_command([sys.executable, "-u", "-c", _CODE, path, str(connection)]),
        env={**dict.fromkeys(names, "1"), **own},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=(connection,),
    )


def _name_signal(status: int) -> str | None:
    """The signal that a reaper's exit status stands for; None: the command ended itself."""
    number = -status if status < 0 else status - 128
    try:
        return signal.Signals(number).name if number > 0 else None
    except ValueError:
        return None


def _set_reward(message: Message, client: Any) -> Message:
    """Does what a worker asks of the trajectory's client; what that refuses is raised there."""
    try:
        getattr(client, message["op"])(*message["arguments"])
    except (KeyError, ValueError, TypeError) as error:
        text = str(error.args[0]) if error.args else str(error)
        return {"error": type(error).__name__, "message": text}
    return {"error": None}


class WorkerLog:
    """One log of what agents print in all workers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._file: FileIO | None = None

    def open(self, path: Path) -> None:
        """Writes to ``path`` from now on, after what is there."""
        self.close()
        try:
            path.touch(0o600)
            file = path.open("ab", buffering=0)
        except OSError as error:
            _log.warning("what agents print is not logged: %s: %s", path, error.strerror)
            return
        with self._lock:
            self._file = file

    def append(self, text: bytes) -> None:
        """Writes whole lines."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(text)
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
            if len(self._rest) > _MAX_LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            self._log.append(b"".join(map(self._format, lines)))

    def end_line(self) -> None:
        """Ends the last line, if it has no end of its own."""
        if self._rest:
            self.write(b"\n")

    def quote(self) -> str:
        """A clause with the last lines; empty if there are none."""
        with self._lock:
            lines = list(self._last_lines)
        if not lines:
            return ""
        return "\nThe last lines that it wrote:\n" + "\n".join(f"  | {line}" for line in lines)

    def _format(self, line: bytes) -> bytes:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", errors="replace").rstrip("\r")
        text = sanitize(text)
        self._last_lines.append(text)
        if self._num_logged_bytes > _MAX_LOGGED_BYTES:
            return b""
        self._num_logged_bytes += len(line)
        if self._num_logged_bytes > _MAX_LOGGED_BYTES:
            text = f"(what it wrote after {_MAX_LOGGED_BYTES >> 20} MiB is not kept)"
        return f"{self._label or 'agent worker'} | {text}\n".encode()
