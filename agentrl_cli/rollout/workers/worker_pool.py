"""The agents of a configuration, and the pool of worker processes that run them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from agentrl_cli.agents.agent_building import AgentSpec, list_agent_specs
from agentrl_cli.agents.agent_runner import AgentCall, AgentOutcome, run_in_thread
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import BuilderError, ConfigError, DatasetError, RunError
from agentrl_cli.log import get_logger
from agentrl_cli.rollout.workers.worker_log import WorkerLog
from agentrl_cli.rollout.workers.worker_process import AgentProcessError, AgentWorker
from agentrl_cli.rollout.workers.worker_program import MessageError

_log = get_logger(__name__)

#: The log of what agents print, in the run's folder of logs.
LOG_NAME = "agent-workers.log"
#: Importing a framework from a cold disk takes a minute, many workers start at the same time, and
#: a builder may load more.
_START_SECONDS = 300.0
_TRIAL_SECONDS = 600.0
#: How long a worker may clean up after a trajectory.
_SETTLE_SECONDS = 10.0
#: So many starts that fail in a row end the run.
_MAX_FAILED_STARTS = 3
#: The memory of the workers is looked at this often: a process fills about 0.3 GiB in that time.
_MEMORY_SECONDS = 0.2
#: Other processes that a worker has started are looked for once in so many looks.
_LOOKS_PER_SEARCH = 5


class WorkerSlot:
    """A worker that runs one trajectory's agent; from :meth:`WorkerPool.take`."""

    def __init__(
        self,
        worker: AgentWorker,
        label: str,
        modules: str,
        give_back: Callable[[AgentWorker], None],
    ) -> None:
        self._worker = worker
        self._label = label
        self._modules = modules
        self._give_back: Callable[[AgentWorker], None] | None = give_back

    async def run(self, spec: AgentSpec, call: AgentCall) -> AgentOutcome:
        """What the agent ended with. Raises as :meth:`AgentWorker.run`."""
        try:
            return await self._worker.run(spec, call, label=self._label, modules=self._modules)
        finally:
            # The worker is free while the trajectory is judged.
            self.release()

    def release(self) -> None:
        """Gives the worker back to the pool; may be called twice."""
        if self._give_back is not None:
            self._give_back(self._worker)
            self._give_back = None

    def describe_late(self) -> str:
        """A clause for an agent that passed its deadline."""
        return self._worker.describe_late()


class WorkerPool:
    """Long-lived workers, each for one trajectory at a time.

    A worker is replaced after ``max_tasks`` trajectories, when its process has ended, and when
    an agent left a process behind.

    Args:
        num_workers: trajectories at the same time.
        start_worker: starts a worker process.
        max_tasks: trajectories of one worker.
        modules: whether the user's modules are imported again for every trajectory.
    """

    def __init__(
        self,
        num_workers: int,
        start_worker: Callable[[], AgentWorker],
        *,
        max_tasks: int = 1,
        modules: Literal["reloaded", "kept"] = "reloaded",
    ) -> None:
        self._num_workers = num_workers
        self._start_worker = start_worker
        self._max_tasks = max_tasks
        self._modules = modules
        self._idle: list[AgentWorker] = []
        self.workers: set[AgentWorker] = set()
        """All whose process may still run."""
        self._num_failed_starts = 0
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self) -> AgentWorker:
        """A new worker, which may not be ready yet. Raises OSError."""
        worker = self._start_worker()
        self.workers.add(worker)
        return worker

    def add_idle(self, worker: AgentWorker) -> None:
        """Takes a worker that is ready for its next trajectory."""
        self._idle.append(worker)

    @asynccontextmanager
    async def take(self, label: str) -> AsyncIterator[WorkerSlot]:
        """A worker for the trajectory called ``label``, as soon as there is one.

        Raises:
            RunError: workers cannot be started.
        """
        slots = self._find_slots()
        await slots.acquire()
        try:
            worker = await self._find_worker()
        except BaseException:
            slots.release()
            raise
        slot = WorkerSlot(worker, label, self._modules, partial(self._give_back, slots))
        try:
            yield slot
        finally:
            slot.release()

    def close(self) -> None:
        """Ends all workers and what they have started; may be called twice."""
        self._is_closed = True
        for worker in self.workers:
            worker.kill()
        while self.workers:
            self.workers.pop().end()

    def discard(self, worker: AgentWorker) -> None:
        """Ends a worker and waits until nothing of it is left; blocks."""
        worker.end()
        self.workers.discard(worker)

    def _find_slots(self) -> asyncio.Semaphore:
        """The running loop's semaphore: asyncio's belong to the loop that first waits on them."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(self._num_workers))
        return self._slots[1]

    async def _find_worker(self) -> AgentWorker:
        while not self._is_closed:
            if self._idle:
                worker = self._idle.pop()
                if not worker.has_ended:
                    return worker
                await run_in_thread(partial(self.discard, worker), "agent worker")
                continue
            try:
                worker = self.start()
            except OSError as error:
                raise RunError(f"the system starts no process for an agent: {error}") from error
            try:
                waiting = partial(worker.wait_until_idle, _START_SECONDS)
                await run_in_thread(waiting, "agent worker")
            except (AgentProcessError, MessageError, TimeoutError) as error:
                await run_in_thread(partial(self.discard, worker), "agent worker")
                self._count_failed_start(error)
            except BaseException:
                worker.kill()
                raise
            else:
                self._num_failed_starts = 0
                return worker
        raise RunError("the pool of agent workers was closed")

    def _count_failed_start(self, error: Exception) -> None:
        self._num_failed_starts += 1
        if self._num_failed_starts >= _MAX_FAILED_STARTS:
            raise RunError(
                f"processes for agents end as soon as they start, {self._num_failed_starts} of "
                f"them in a row: {error}"
            )

    def _give_back(self, slots: asyncio.Semaphore, worker: AgentWorker) -> None:
        task = asyncio.get_running_loop().create_task(self._settle(slots, worker))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def _settle(self, slots: asyncio.Semaphore, worker: AgentWorker) -> None:
        """Keeps a worker for its next trajectory, or has it end."""
        is_kept = worker.num_tasks == 0
        try:
            if 0 < worker.num_tasks < self._max_tasks and not worker.has_ended:
                waiting = partial(worker.wait_until_idle, _SETTLE_SECONDS)
                is_kept = await run_in_thread(waiting, "agent worker")
        except (AgentProcessError, MessageError, TimeoutError, OSError) as error:
            _log.debug("a worker is replaced: %s", error)
            worker.kill()
        finally:
            if is_kept and not self._is_closed:
                self._idle.append(worker)
            slots.release()
        if not is_kept:
            # Not killed at once, so that what the agent has registered for its end runs.
            await run_in_thread(worker.retire, "agent worker")
            self.workers.discard(worker)


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """An agent that workers build and run, and what is known of it here."""

    spec: AgentSpec
    framework: str
    gives_rewards: bool
    input_fields: tuple[str, ...]

    @property
    def runner(self) -> RemoteAgent:
        """Itself: tells what it is."""
        return self

    def check_row(self, row: Mapping[str, Any], place: str) -> None:
        """Refuses a row that would not reach a worker as it is.

        Raises:
            DatasetError: naming the field.
        """
        for where, value in _find_strange("", row):
            raise DatasetError(
                f"{place}: {where.lstrip('.')} is {type(value).__name__}, which does not reach an "
                "agent in another process as it is. Allowed: text, numbers, true, false, null, "
                "lists, and mappings with text as keys. Convert it, or type "
                "rollout.agent_mode=inline"
            )


class WorkerAgents:
    """All agents of a configuration and the workers that run them.

    Raises:
        UserInputError: an agent cannot be built; found out in a process of its own.
        RunError: no process can be started.
    """

    def __init__(self, config: ExperimentConfig) -> None:
        specs = list_agent_specs(config)
        for spec in specs.values():
            _check_kwargs(spec)
        rollout = config.rollout
        self._log = WorkerLog()
        max_gib = rollout.worker_max_memory_gib
        self._pool = WorkerPool(
            rollout.count_parallel(),
            partial(AgentWorker, self._log, max_gib),
            max_tasks=rollout.worker_max_tasks,
            modules=rollout.worker_modules,
        )
        self._is_closed = threading.Event()
        try:
            traits = self._try_agents(list(specs.values()))
        except BaseException:
            self.close()
            raise
        self.agents: dict[str | None, RemoteAgent] = {
            name: RemoteAgent(
                spec, told["framework"], told["gives_rewards"], tuple(told["input_fields"])
            )
            for (name, spec), told in zip(specs.items(), traits, strict=True)
        }
        if max_gib is not None:
            watching = partial(self._watch_memory, int(max_gib * 2**30))
            threading.Thread(target=watching, name="memory of agents", daemon=True).start()

    @property
    def take(self) -> Callable[[str], Any]:
        """See :meth:`WorkerPool.take`."""
        return self._pool.take

    def log_to(self, folder: Path) -> None:
        """Says where what agents print is kept."""
        self._log.open(folder / LOG_NAME)

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        self._is_closed.set()
        self._pool.close()
        self._log.close()

    def _try_agents(self, specs: list[AgentSpec]) -> list[dict[str, Any]]:
        """What the agents are, found out in the first worker."""
        where = f"{', '.join(spec.key for spec in specs)}: while the builder was tried in a "
        where += "process of its own"
        try:
            worker = self._pool.start()
            worker.wait_until_idle(_START_SECONDS)
        except (OSError, AgentProcessError, MessageError) as error:
            raise RunError(f"no process for an agent can be started: {error}") from error
        try:
            traits = worker.try_agents(specs, _TRIAL_SECONDS)
            is_reusable = worker.wait_until_idle(_SETTLE_SECONDS)
        except TimeoutError:
            raise BuilderError(f"{where}, it did not end in {_TRIAL_SECONDS:g} seconds") from None
        except (OSError, AgentProcessError, MessageError) as error:
            raise BuilderError(f"{where}: {error}") from error
        if is_reusable:
            self._pool.add_idle(worker)
        else:
            self._pool.discard(worker)
        return traits

    def _watch_memory(self, max_bytes: int) -> None:
        """Kills workers that take too much, until the pool is closed."""
        num_looks = 0
        while not self._is_closed.wait(_MEMORY_SECONDS):
            num_looks += 1
            workers = list(self._pool.workers)
            if num_looks % _LOOKS_PER_SEARCH == 0:
                used = _measure_trees([worker.reaper_pid for worker in workers])
            else:
                used = {w.reaper_pid: _measure(w.pid) for w in workers if w.pid is not None}
            for worker in workers:
                num_bytes = used.get(worker.reaper_pid, 0)
                if num_bytes > max_bytes and worker.memory_bytes is None:
                    worker.memory_bytes = num_bytes
                    worker.kill()


def _measure(pid: int) -> int:
    """Bytes of RAM that a process uses."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _measure_trees(roots: Sequence[int]) -> dict[int, int]:
    """Bytes of RAM by process, what it has started included; one pass over all processes."""
    found = {p.pid: p.info for p in psutil.process_iter(["ppid", "memory_info"])}
    used = dict.fromkeys(roots, 0)
    for pid, info in found.items():
        if info["memory_info"] is None:
            continue
        while pid not in used and pid in found:
            pid = found[pid]["ppid"] or 0
        if pid in used:
            used[pid] += info["memory_info"].rss
    return used


def _check_kwargs(spec: AgentSpec) -> None:
    key = spec.key.replace("agent_builder_path", "agent_builder_kwargs")
    for where, value in _find_strange("", spec.kwargs):
        raise ConfigError(
            f"{key}{where}: {value!r} is {type(value).__name__}, which does not reach an agent in "
            "another process as it is. Write it in quotes, so that it is text, or type "
            "rollout.agent_mode=inline"
        )


def _find_strange(where: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What JSON would change or refuse, and where it is."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if type(name) is not str:
                yield f"{where} (its key {name!r})", name
            yield from _find_strange(f"{where}.{name}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _find_strange(f"{where}[{index}]", item)
    elif not (value is None or isinstance(value, str | bool | int | float)):
        yield where, value
