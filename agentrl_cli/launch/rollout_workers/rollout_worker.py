"""One rollout worker, seen from the trainer: started, given attempts, watched, and ended."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.agents.agent_runner import run_in_thread
from agentrl_cli.engine.router.server_mirror import ServerMirror
from agentrl_cli.errors import build_error
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.managed_process import Process, StartProcess
from agentrl_cli.launch.rollout_workers.loop_watchdog import Stall
from agentrl_cli.log import get_logger
from agentrl_cli.process_channel import Message, MessageStream
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.store.trajectory_record import format_record, parse_record

_log = get_logger(__name__)

#: Importing a framework from a cold disk takes a minute, and a builder may load more.
_START_SECONDS = 600.0
#: How long a worker may end what its agents have started, before it is killed.
_END_SECONDS = 5.0
_KILL_SECONDS = 10.0
_NUM_QUOTED_LINES = 20
_SIGKILLED = 128 + signal.SIGKILL
_KILLED_HINT = (
    ", and agentrl did not: most often the system ran out of memory (lower rollout.num_workers or "
    "rollout.max_concurrent)"
)


class WorkerLostError(Exception):
    """The worker ended before the trajectory had.

    Attributes:
        blocked_by: the trajectory for whose code it was killed.
    """

    def __init__(self, reason: str, blocked_by: str | None = None) -> None:
        super().__init__(reason)
        self.blocked_by = blocked_by


class NotBegunError(Exception):
    """The worker ended, or was found blocked, before it began the trajectory."""


class RolloutWorker:
    """A rollout worker's process and the connection to it, on one event loop.

    Args:
        planned: the process; logs and messages call it by its name.
        log_dir: gets its log.
        start_process: starts its process; see :meth:`Placement.start_process`.
        on_stall: called when its event loop is found blocked, and with None when it is not any
            more.
        on_listening: called with a text for the user and a port when it listens for programs
            elsewhere.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        log_dir: Path,
        start_process: StartProcess,
        on_stall: Callable[[RolloutWorker, Stall | None], None],
        on_listening: Callable[[str, int], None],
    ) -> None:
        self.name = planned.name
        self.log_path = log_dir / f"{planned.name}.log"
        self._planned = planned
        self.stall: Stall | None = None
        """How its event loop is blocked."""
        self.heard_at = 0.0
        """When it last gave a sign of life, by the loop's clock."""
        self.mirror: ServerMirror | None = None
        self.end_reason = ""
        """Why it ended, once it has."""
        self._start_process = start_process
        self._on_stall = on_stall
        self._on_listening = on_listening
        self._loop = asyncio.get_running_loop()
        self._keys = itertools.count()
        self._running: dict[int, asyncio.Future[Trajectory]] = {}
        self._attempts: dict[int, Attempt] = {}
        self._begun: set[int] = set()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._stream: MessageStream | None = None
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._killed_for: WorkerLostError | None = None
        self._has_ended = False

    @property
    def is_free(self) -> bool:
        """True while it may get another trajectory."""
        return not self._has_ended and self.stall is None

    @property
    def num_running(self) -> int:
        """Trajectories in progress."""
        return len(self._running)

    async def start(self, spec: Message) -> None:
        """Returns when it is ready for attempts.

        Raises:
            UserInputError: an agent or a reward cannot be used there.
            WorkerLostError: it ended.
            EngineError: the operating system starts no more processes.
        """
        self._process, ours = self._start_process(self._planned, self.log_path)
        self._stream = await MessageStream.open(ours)
        self._stream.send({**spec, "name": self.name})
        self._reading = asyncio.create_task(self._read(self._stream), name=self.name)
        if not (await asyncio.wait({self._ready}, timeout=_START_SECONDS))[0]:
            self.kill(WorkerLostError(f"it was not ready within {_START_SECONDS:g} s"))
        await self._ready

    async def wait_until_ended(self) -> None:
        """Returns when its process is gone, with all that it has started."""
        if self._reading is not None:
            await asyncio.wait({self._reading})

    async def run(self, split: str, attempt: Attempt) -> Trajectory:
        """The record of one attempt, made there.

        Raises:
            NotBegunError: it is to be made elsewhere; nothing has happened.
            WorkerLostError: it ended before the trajectory had.
            AgentrlError: what the workflow raised.
        """
        key = next(self._keys)
        future = self._running[key] = self._loop.create_future()
        self._attempts[key] = attempt
        try:
            told = asdict(replace(attempt, earlier=()))
            record = b""
            if attempt.earlier:
                record = format_record(attempt.begin_trajectory(interactions=attempt.earlier))
            self.send({"op": "run", "key": key, "split": split, "attempt": told}, record)
            return await future
        finally:
            del self._running[key], self._attempts[key]
            if key not in self._begun or future.cancelled():
                self.send({"op": "cancel", "key": key})
            self._begun.discard(key)

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Sends, without waiting."""
        if self._stream is not None:
            self._stream.send(message, payload)

    def list_running(self) -> dict[str, str]:
        """The trajectories in progress: their ids, and what to call them."""
        names = {a.id: a.task.row.get("agent_name") for a in self._attempts.values()}
        return {key: key + (f" (agent {name})" if name else "") for key, name in names.items()}

    def note_silence(self, seconds: float) -> None:
        """Takes it for blocked when it has given no sign of life for so long."""
        self._take_stall(Stall(seconds=seconds))

    def kill(self, error: WorkerLostError) -> None:
        """Ends it at once; what it runs is lost with ``error``."""
        self._killed_for = self._killed_for or error
        if self._process is not None:
            self._process.kill()

    async def end(self) -> None:
        """Lets it end, and kills it where it does not."""
        if self._stream is not None:
            self._stream.close()
        if self._process is not None:
            await run_in_thread(partial(self._wait_or_kill, _END_SECONDS), f"end of {self.name}")
        if self._reading is not None:
            self._reading.cancel()

    def end_at_once(self) -> None:
        """Kills it and waits until it is gone; from any thread."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_KILL_SECONDS)

    def _wait_or_kill(self, seconds: float) -> int | None:
        assert self._process is not None
        status = self._process.wait(seconds)
        if status is None:
            self._process.kill()
            status = self._process.wait(_KILL_SECONDS)
        return status

    def _quote_log(self) -> str:
        """A clause with the last lines that it wrote."""
        assert self._process is not None
        lines = self._process.read_log().splitlines()[-_NUM_QUOTED_LINES:]
        return f"\nThe last lines of {self.log_path}:" + "".join(f"\n  | {line}" for line in lines)

    async def _read(self, stream: MessageStream) -> None:
        """Takes what the worker sends until it ends, and then ends what it was running."""
        try:
            while True:
                self._take(*await stream.receive())
        except EOFError:
            # Its process has ended, or is about to; how it did is found out below.
            problem = ""
        except (ValueError, KeyError, TypeError) as error:
            _log.exception("what %s sent cannot be read", self.name)
            problem = f"what it sent cannot be read ({type(error).__name__}: {error}); "
        self._has_ended = True
        stream.close()
        seconds = 0.0 if self._killed_for is not None or problem else _END_SECONDS
        waiting = partial(self._wait_or_kill, seconds)
        status = await run_in_thread(waiting, f"end of {self.name}")
        assert self._process is not None
        ended = self._process.describe_end()
        if status == _SIGKILLED:
            ended += _KILLED_HINT
        lost = self._killed_for or WorkerLostError(f"{problem}it {ended}{self._quote_log()}")
        self.end_reason = str(lost)
        if self.mirror is not None:
            self.mirror.close()
        self._give_back()
        waiting_for: list[asyncio.Future[Any]] = [self._ready, *self._running.values()]
        for future in waiting_for:
            if not future.done():
                future.set_exception(WorkerLostError(str(lost), lost.blocked_by))
        # Where nobody waits for it.
        self._ready.exception()

    def _give_back(self) -> None:
        """Has what it has not begun made elsewhere."""
        for key, future in self._running.items():
            if key not in self._begun and not future.done():
                future.set_exception(NotBegunError())

    def _take(self, message: Message, payload: bytes) -> None:
        op, self.heard_at = message["op"], self._loop.time()
        if op == "alive":
            told = message["stall"]
            self._take_stall(None if told is None else Stall(**told))
        elif op == "begun":
            self._begun.add(message["key"])
        elif op == "ended":
            self._end_one(message, payload)
        elif op == "ready":
            self._ready.set_result(None)
        elif op == "listening":
            self._on_listening(message["text"], message["port"])
        elif op == "refused":
            self._ready.set_exception(build_error(*message["error"]))
        elif self.mirror is not None:
            self.mirror.receive(message)

    def _end_one(self, message: Message, record: bytes) -> None:
        future = self._running.get(message["key"])
        if future is None or future.done():
            return
        if message["error"] is not None:
            future.set_exception(build_error(*message["error"]))
            return
        trajectory = parse_record(record)
        if message["has_given_row"]:
            # As it is here: what is no JSON does not come back as it went.
            trajectory = replace(trajectory, task=self._attempts[message["key"]].task.row)
        future.set_result(trajectory)

    def _take_stall(self, stall: Stall | None) -> None:
        was_stalled, self.stall = self.stall is not None, stall
        if self.mirror is not None:
            self.mirror.is_stalled = stall is not None
        if stall is not None and not was_stalled:
            self._give_back()
        if was_stalled != (stall is not None):
            self._on_stall(self, stall)
