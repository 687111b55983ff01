"""The pool of workers: as many as may run at once, each for one trajectory at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl_cli.errors import RunError
from agentrl_cli.log import get_logger
from agentrl_cli.rollout.worker_channel import ChannelError, Message
from agentrl_cli.rollout.worker_errors import build_process_error
from agentrl_cli.rollout.worker_host_process import HostProcess
from agentrl_cli.rollout.worker_lease import WorkerLease
from agentrl_cli.rollout.worker_process import AgentSpec

_log = get_logger(__name__)

#: A new interpreter that imports a framework takes 3 seconds alone, and many start together.
_START_SECONDS = 300.0
#: How long a worker may clean up after a trajectory.
_RETIRE_SECONDS = 10.0
#: So many starts, or hosts, that fail in a row end the run.
_MAX_FAILED_STARTS = 3
_LISTENER = "what the host of the agent workers tells"


@dataclass(slots=True)
class _OnLoop:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[Any, Any, None], name: str | None = None) -> None:
        task = self.loop.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class WorkerPool:
    """Workers that are started ahead, replaced after ``max_tasks`` trajectories or a failure.

    Args:
        num_workers: trajectories at once.
        max_tasks: trajectories of one worker.
        max_memory_gib: of one worker and what it starts; None: no limit.
    """

    def __init__(
        self, num_workers: int, *, max_tasks: int = 1, max_memory_gib: float | None = None
    ) -> None:
        self._num_workers = num_workers
        self._max_tasks = max_tasks
        self._max_memory_gib = max_memory_gib
        self._modules: list[str] = []
        self._log_path: Path | None = None
        self._host: HostProcess | None = None
        self._workers: dict[int, WorkerLease] = {}
        """All whose channel is open."""
        self._working: set[int] = set()
        """Those that work or will; not those that only clean up."""
        self._unready: list[WorkerLease] = []
        self._ready: deque[WorkerLease] = deque()
        self._num_failed = 0
        self._error: str | None = None
        self._on_loop: _OnLoop | None = None
        self._is_closed = False

    def prepare(self, specs: Sequence[AgentSpec]) -> list[dict[str, Any]]:
        """Tries the agents in a process of their own, and starts the workers.

        Returns:
            For each agent what :class:`AgentTraits` are made of.

        Raises:
            UserInputError: an agent cannot be built.
            RunError: no process can be started.
        """
        host = self._start_host()
        reply = host.try_agents(specs)
        self._modules = reply["modules"]
        host.tell("preload", modules=self._modules)
        self._fill()
        return list(reply["agents"])

    def log_to(self, path: Path) -> None:
        """What agents print goes to ``path``."""
        self._log_path = path
        if self._host is not None:
            self._host.log_to(path)

    @asynccontextmanager
    async def lease(self, label: str) -> AsyncIterator[WorkerLease]:
        """A worker that is ready, as soon as there is one, for the trajectory called ``label``.

        Raises:
            RunError: workers cannot be started.
        """
        on_loop = self._bind()
        worker = await self._take(on_loop)
        is_held = True

        def give_back() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._give_back(worker, on_loop)

        worker.on_done = give_back
        try:
            if self._host is not None:
                self._host.tell("label", worker=worker.number, label=label)
            yield worker
        finally:
            give_back()

    def close(self) -> None:
        """Ends all workers and what they have started; may be called twice.

        On the loop that uses the pool, or when that has ended.
        """
        self._is_closed = True
        self._lose_host()

    # -- workers --------------------------------------------------------------------------

    async def _take(self, on_loop: _OnLoop) -> WorkerLease:
        while True:
            if self._is_closed:
                raise RunError("the pool of agent workers was closed")
            if self._error is not None:
                raise RunError(self._error)
            self._fill()
            while self._ready:
                worker = self._ready.popleft()
                if not worker.has_ended:
                    return worker
                self._forget(worker)
            on_loop.changed.clear()
            await on_loop.changed.wait()

    def _give_back(self, worker: WorkerLease, on_loop: _OnLoop) -> None:
        self._learn(worker.modules)
        if self._on_loop is not on_loop or worker.has_ended:
            self._forget(worker)
        elif worker.state == "idle":
            self._ready.append(worker)
        elif worker.state == "finished" and worker.num_tasks < self._max_tasks:
            on_loop.spawn(self._admit(worker))
        else:
            # Not killed: what the agent has registered for its end shall run.
            self._working.discard(worker.number)
            on_loop.spawn(self._retire(worker))
        on_loop.changed.set()
        if not self._is_closed:
            self._fill()

    def _learn(self, modules: list[str]) -> None:
        """Has later workers begin with what an agent had to import while it ran."""
        new = [name for name in modules if name not in set(self._modules)]
        self._modules += new
        if new and self._host is not None:
            self._host.tell("preload", modules=new)

    async def _retire(self, worker: WorkerLease) -> None:
        await worker.retire(_RETIRE_SECONDS)
        self._forget(worker)

    def _forget(self, worker: WorkerLease) -> None:
        """Lets go of a worker that is no more."""
        self._working.discard(worker.number)
        self._workers.pop(worker.number, None)
        worker.close_channel()

    def _fill(self) -> None:
        """Starts workers until there are enough."""
        while len(self._working) < self._num_workers and self._error is None:
            host = self._host or self._start_host()
            try:
                number, channel = host.start_worker()
            except OSError as error:
                _log.warning("the host of the agents' workers does not answer: %s", error)
                self._lose_host()
                self._count_failure(None)
                continue
            worker = WorkerLease(number, channel, self._kill, self._max_memory_gib)
            self._workers[number] = worker
            self._working.add(number)
            self._unready.append(worker)
        if self._on_loop is not None:
            unready, self._unready = self._unready, []
            for worker in unready:
                self._on_loop.spawn(self._admit(worker))

    async def _admit(self, worker: WorkerLease) -> None:
        """Waits until a worker is ready, and has it wait for work."""
        is_new = worker.num_tasks == 0
        if await worker.begin(self._modules, _START_SECONDS if is_new else _RETIRE_SECONDS):
            self._num_failed = 0
            self._ready.append(worker)
        else:
            self._forget(worker)
            if is_new:
                self._count_failure(worker.end)
        if self._on_loop is not None:
            self._on_loop.changed.set()

    def _count_failure(self, end: Message | None) -> None:
        self._num_failed += 1
        if self._num_failed >= _MAX_FAILED_STARTS:
            how = build_process_error(end, self._max_memory_gib)
            self._error = (
                f"processes for agents end as soon as they start, {self._num_failed} of them in a "
                f"row: {how}"
            )

    def _kill(self, number: int) -> None:
        if self._host is not None:
            self._host.tell("kill", worker=number)

    # -- the host -------------------------------------------------------------------------

    def _bind(self) -> _OnLoop:
        """The state on the running loop; what ran on another one before is ended."""
        loop = asyncio.get_running_loop()
        if self._on_loop is None or self._on_loop.loop is not loop:
            if self._on_loop is not None:
                # Their events and sockets were waited on by a loop that is no more.
                self._lose_host()
            self._on_loop = _OnLoop(loop)
            if self._host is not None:
                self._on_loop.spawn(self._listen(self._host), _LISTENER)
        return self._on_loop

    def _start_host(self) -> HostProcess:
        limit = self._max_memory_gib
        self._host = HostProcess(None if limit is None else int(limit * 2**30))
        if self._log_path is not None:
            self._host.log_to(self._log_path)
        if self._modules:
            self._host.tell("preload", modules=self._modules)
        if self._on_loop is not None:
            self._on_loop.spawn(self._listen(self._host), _LISTENER)
        return self._host

    async def _listen(self, host: HostProcess) -> None:
        """Takes in what the host tells, until it is gone."""
        try:
            while (message := await host.reports.receive_async()) is not None:
                self._take_report(message)
        except (OSError, ChannelError) as error:
            _log.warning("the host of the agents' workers is lost: %s", error)
        if self._host is host:
            _log.warning(
                "the host of the agents' workers has ended and is started anew: %s",
                host.read_stderr(),
            )
            self._lose_host()
            self._count_failure(None)
            if self._on_loop is not None:
                self._on_loop.changed.set()

    def _take_report(self, message: Message) -> None:
        if message["op"] == "ended":
            worker = self._workers.get(message["worker"])
            self._working.discard(message["worker"])
            if worker is not None:
                worker.set_ended(message)
            if self._on_loop is not None:
                self._on_loop.changed.set()
        elif message["op"] == "log_failed":
            _log.warning("what agents print is not logged any more: %s", message["message"])
        elif message["op"] == "preloaded" and not message["forks"]:
            _log.warning(
                "a library of the agents has started threads%s, so each worker is an interpreter "
                "of its own, which takes seconds to start. Raise rollout.worker_max_tasks to start "
                "fewer of them",
                f" ({', '.join(message['threads'])})" if message["threads"] else "",
            )

    def _lose_host(self) -> None:
        """Ends the host, if there is one, and gives up its workers."""
        host, self._host = self._host, None
        for worker in self._workers.values():
            worker.set_ended(worker.end)
            worker.close_channel()
        self._workers.clear()
        self._working.clear()
        self._ready.clear()
        self._unready.clear()
        if self._on_loop is not None and not self._on_loop.loop.is_closed():
            for task in self._on_loop.tasks:
                if task.get_name() == _LISTENER and task is not _find_current_task():
                    task.cancel()
            self._on_loop.changed.set()
        if host is not None:
            host.close()


def _find_current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
