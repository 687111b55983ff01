"""One worker process, seen from the trainer: started, given trajectories, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agentrl_cli.agents.agent_building import AgentSpec
from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, run_in_thread
from agentrl_cli.errors import UserInputError, build_error
from agentrl_cli.process_reaper import KILL_SIGNAL, REAPER_PATH
from agentrl_cli.records import Boundary, Failure
from agentrl_cli.rollout.rollout_failures import AgentRunError
from agentrl_cli.rollout.workers.worker_log import WorkerLog, WorkerOutput
from agentrl_cli.rollout.workers.worker_program import (
    MODEL_VARIABLES,
    REWARD_CALLS,
    Message,
    MessageError,
    encode_message,
    read_message,
)

#: Between SIGKILL and the end of a process and of all that it has started.
_KILL_SECONDS = 10.0
#: A worker that ended has closed its connection a moment before.
_EXIT_SECONDS = 3.0
#: How long a worker that is no longer needed may run what its agents registered for its end.
_RETIRE_SECONDS = 10.0
_PIECE_BYTES = 2**16
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from agentrl_cli.rollout.workers.worker_program import main; main(int(sys.argv[1]))"
)
_SIGNAL_HINTS = {
    "SIGSEGV": " (a crash in native code)",
    "SIGABRT": " (native code gave up)",
    "SIGBUS": " (a crash in native code, or a full disk)",
    "SIGFPE": " (a crash in native code)",
    "SIGILL": " (native code for another processor)",
    "SIGKILL": ", and agentrl did not: most often the system ran out of memory. Lower "
    "rollout.num_workers, or set rollout.worker_max_memory_gib",
}


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

    Raises:
        OSError: the system starts no further process.
    """

    def __init__(self, log: WorkerLog, max_memory_gib: float | None = None) -> None:
        self.pid: int | None = None
        """Its process id, once it is ready."""
        self.num_tasks = 0
        self.memory_bytes: int | None = None
        """What it used when it was killed for using too much."""
        self._max_memory_gib = max_memory_gib
        self._socket, other = socket.socketpair()
        try:
            with other:
                self._reaper = _start(other.fileno())
        except BaseException:
            self._socket.close()
            raise
        self._reader = self._socket.makefile("rb")
        self._output = WorkerOutput(log)
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
            MessageError: the agent wrote to the connection.
        """
        message = self._receive_within(timeout_seconds)
        if message["op"] != "idle" or not isinstance(message.get("pid"), int):
            raise MessageError(f"a worker sent {message['op']!r} and not that it is idle")
        self.pid = message["pid"]
        return message.get("is_reusable") is True

    def try_agents(self, specs: list[AgentSpec], timeout_seconds: float) -> list[dict[str, Any]]:
        """What the agents are, from building each of them once; blocks.

        Raises:
            UserInputError: a builder cannot be used; the message is that of a run inline.
            TimeoutError: it takes too long.
            AgentProcessError: a builder ended the process.
        """
        self._send({"op": "try", "agents": [asdict(spec) for spec in specs]})
        reply = self._receive_within(timeout_seconds)
        if reply["op"] == "refused":
            raise build_error(reply["error"], reply["message"], UserInputError.exit_code)
        return list(reply["agents"])

    async def run(
        self, spec: AgentSpec, call: AgentCall, *, label: str, modules: str
    ) -> AgentOutcome:
        """What the agent ended with. Cancelled, it ends the process first.

        Raises:
            AgentRunError: the agent raised.
            AgentProcessError: the process ended before the agent.
            UserInputError: a mistake that would repeat itself in every trajectory.
        """
        self.num_tasks += 1
        self._output.begin(label)
        request = {
            "op": "run",
            "agent": asdict(spec),
            "row": dict(call.row),
            "model": call.model,
            "base_url": call.base_url,
            "api_key": call.api_key,
            "max_turns": call.max_turns,
            "modules": modules,
        }
        try:
            return self._read_outcome(await self._exchange(request, call.client))
        except MessageError as error:
            await run_in_thread(self.end, "ending an agent worker")
            raise AgentProcessError(f"the agent's process was killed: {error}") from None
        except asyncio.CancelledError:
            await run_in_thread(self.end, "ending an agent worker")
            raise

    async def _exchange(self, request: Mapping[str, Any], client: Any) -> Message:
        """The worker's answer to ``request``; the rewards that it gives meanwhile are set here."""
        message: Message | None = None
        try:
            await run_in_thread(partial(self._send, request), "agent worker")
            while (message := await run_in_thread(self._receive, "agent worker")) is not None:
                if message["op"] not in REWARD_CALLS:
                    return message
                answer = _set_reward(message, client)
                await run_in_thread(partial(self._send, answer), "agent worker")
        except OSError:
            pass  # It has closed its end.
        raise await run_in_thread(self._describe_end, "agent worker")

    def _read_outcome(self, message: Message) -> AgentOutcome:
        try:
            if message["op"] == "done":
                answer, returned = message["final_answer"], message["returned"]
                return AgentOutcome(final_answer=answer, returned=returned)
            error: Exception
            if message["op"] == "refused":
                error = build_error(message["error"], message["message"], UserInputError.exit_code)
            else:
                told = message["failure"]
                error = AgentRunError(Failure(**{**told, "boundary": Boundary(told["boundary"])}))
        except (KeyError, TypeError, ValueError):
            raise MessageError(f"a line is no message of a worker: {str(message)[:80]}") from None
        raise error

    def describe_late(self) -> str:
        """A clause for an agent that passed its deadline."""
        return f": its process was killed{self._output.quote()}"

    # -- its end --------------------------------------------------------------------------

    def retire(self) -> None:
        """Lets it end by itself, and ends it after a while; blocks."""
        try:
            self._send({"op": "end"})
            self._reaper.wait(_RETIRE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
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
            self._reader.close()
            self._socket.close()

    def _describe_end(self) -> AgentProcessError:
        """The error for a process that has ended or closed its connection; ends it."""
        status = self._wait_for_exit()
        self.end()
        tail = self._output.quote()
        if status is None:
            return AgentProcessError(
                "the agent's process was killed: it closed the connection to the trainer, whose "
                f"file descriptor is not the agent's{tail}"
            )
        if self.memory_bytes is not None:
            return AgentMemoryError(
                f"the agent's process was killed: it used {self.memory_bytes / 2**30:.2f} GiB of "
                f"memory, and rollout.worker_max_memory_gib is {self._max_memory_gib:g}{tail}"
            )
        name = _name_signal(status)
        if name is not None:
            hint = _SIGNAL_HINTS.get(name, "")
            return AgentCrashError(f"the agent's process was killed by {name}{hint}{tail}")
        return AgentExitError(
            f"the agent's process ended itself with exit status {status}, as os._exit({status}) "
            f"does{tail}"
        )

    def _wait_for_exit(self) -> int | None:
        """The exit status; None: the process has only closed its connection."""
        if self.pid is not None:
            try:
                psutil.Process(self.pid).wait(_EXIT_SECONDS)
            except psutil.TimeoutExpired:
                return None
            except psutil.NoSuchProcess:
                """Its reaper has seen its end already."""
        try:
            return self._reaper.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    # -- the connection -------------------------------------------------------------------

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(encode_message(message))

    def _receive_within(self, seconds: float) -> Message:
        self._socket.settimeout(seconds)
        message = self._receive()
        if message is None:
            raise self._describe_end()
        self._socket.settimeout(None)
        return message

    def _receive(self) -> Message | None:
        try:
            return read_message(self._reader)
        except ConnectionError:
            return None

    def _copy_output(self) -> None:
        """Copies what the process writes until nobody is left who could write."""
        assert self._reaper.stdout is not None
        with self._reaper.stdout as output:
            while piece := os.read(output.fileno(), _PIECE_BYTES):
                self._output.write(piece)
        self._output.end_line()


def _start(connection: int) -> subprocess.Popen[bytes]:
    """A worker under a reaper of its own.

    The modules that a user's agent imports are found there as they are here, be it beside the
    YAML, by PYTHONPATH, or by what a test has added to ``sys.path``.
    """
    # "" stands for the current folder, which an agent may leave.
    path = json.dumps([str(Path(entry).absolute()) for entry in sys.path])
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    # One thread for each process, since many share the cores; and nobody's keys.
    own = {name: value for name, value in os.environ.items() if name not in MODEL_VARIABLES}
    return subprocess.Popen(
        [
            *(sys.executable, "-I", "-S", str(REAPER_PATH), str(os.getpid())),
            # Unbuffered: what an agent printed last is not lost with its process.
            *(sys.executable, "-u", "-c", _CODE, path, str(connection)),
        ],
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
    calls: dict[str, Callable[..., None]] = {name: getattr(client, name) for name in REWARD_CALLS}
    try:
        calls[message["op"]](*message["arguments"])
    except (KeyError, ValueError, TypeError) as error:
        text = str(error.args[0]) if error.args else str(error)
        return {"op": "error", "error": type(error).__name__, "message": text}
    return {"op": "ok"}
