"""The agents of a configuration, and the pool of worker processes that run them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from agentrl_cli.agents.agent_building import AgentSpec, list_agent_specs
from agentrl_cli.agents.agent_runner import run_in_thread
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import BuilderError, ConfigError, DatasetError, RunError, UserInputError
from agentrl_cli.log import get_logger
from agentrl_cli.process_channel import find_unsendable
from agentrl_cli.rollout.background_loop import LoopSemaphore
from agentrl_cli.rollout.workers.worker_process import AgentProcessError, AgentWorker, WorkerLog

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
_MAX_STARTS = 3
#: The memory of the workers is looked at this often: a process fills about 0.3 GiB in that time.
_MEMORY_SECONDS = 0.2
#: Other processes that a worker has started are looked for once in so many looks.
_LOOKS_PER_SEARCH = 5


class WorkerPool:
    """Long-lived workers, each for one trajectory at a time.

    A worker is replaced after ``max_tasks`` trajectories, when its process has ended, and when
    an agent left a process behind.

    Args:
        num_workers: trajectories at the same time.
        start_worker: starts a worker process.
        max_tasks: trajectories of one worker.
    """

    def __init__(
        self, num_workers: int, start_worker: Callable[[], AgentWorker], *, max_tasks: int = 1
    ) -> None:
        self._slots = LoopSemaphore(num_workers)
        self._start_worker = start_worker
        self._max_tasks = max_tasks
        self._idle: list[AgentWorker] = []
        self.workers: set[AgentWorker] = set()
        """All whose process may still run."""
        self._taken: dict[AgentWorker, Callable[[], None]] = {}
        """What frees each worker that a trajectory has."""
        self._settling: set[asyncio.Task[None]] = set()
        self._is_closed = threading.Event()

    @asynccontextmanager
    async def take(self, label: str) -> AsyncIterator[AgentWorker]:
        """A worker for the trajectory called ``label``, as soon as there is one.

        Raises:
            RunError: workers cannot be started.
        """
        slots = self._slots.get()
        await slots.acquire()
        try:
            worker = await self._find_worker()
        except BaseException:
            slots.release()
            raise
        # A function of its own for every trajectory: one that gave its worker back before must not
        # take it from the next.
        free = self._taken[worker] = partial(self._free, slots, worker)
        worker.begin(label)
        try:
            yield worker
        finally:
            if self._taken.get(worker) is free:
                self.give_back(worker)

    def give_back(self, worker: AgentWorker) -> None:
        """Frees a worker that was taken; it is done when the block ends, and may be before."""
        self._taken.pop(worker)()

    def _free(self, slots: asyncio.Semaphore, worker: AgentWorker) -> None:
        task = asyncio.get_running_loop().create_task(self._settle(slots, worker))
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    def close(self) -> None:
        """Ends all workers and what they have started; may be called twice."""
        self._is_closed.set()
        for worker in self.workers:
            worker.kill()
        while self.workers:
            self.workers.pop().end()

    def _start(self) -> AgentWorker:
        """A new worker, which may not be ready yet."""
        if self._is_closed.is_set():
            raise RunError("the pool of agent workers was closed")
        try:
            worker = self._start_worker()
        except OSError as error:
            raise RunError(f"no process for an agent can be started: {error}") from error
        self.workers.add(worker)
        return worker

    def _discard(self, worker: AgentWorker) -> None:
        """Ends a worker and waits until nothing of it is left; blocks."""
        worker.end()
        self.workers.discard(worker)

    async def _find_worker(self) -> AgentWorker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:
                return worker
            await run_in_thread(partial(self._discard, worker), "agent worker")
        problem: Exception | None = None
        for _ in range(_MAX_STARTS):
            worker = self._start()
            try:
                waiting = partial(worker.wait_until_idle, _START_SECONDS)
                await run_in_thread(waiting, "agent worker")
            except (AgentProcessError, TimeoutError) as error:
                problem = error
                await run_in_thread(partial(self._discard, worker), "agent worker")
            except BaseException:
                worker.kill()
                raise
            else:
                return worker
        raise RunError(
            f"processes for agents end as soon as they start, {_MAX_STARTS} of them in a row: "
            f"{problem}"
        )

    async def _settle(self, slots: asyncio.Semaphore, worker: AgentWorker) -> None:
        """Keeps a worker for its next trajectory, or has it end."""
        is_kept = worker.num_tasks == 0
        try:
            if 0 < worker.num_tasks < self._max_tasks and not worker.has_ended:
                waiting = partial(worker.wait_until_idle, _SETTLE_SECONDS)
                is_kept = await run_in_thread(waiting, "agent worker")
        except (AgentProcessError, TimeoutError) as error:
            _log.debug("a worker is replaced: %s", error)
            worker.kill()
        finally:
            if is_kept and not self._is_closed.is_set():
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
        for where, value in find_unsendable(row):
            raise DatasetError(
                f"{place}: {where.lstrip('.')} is {type(value).__name__}, which does not reach an "
                "agent in another process as it is. Allowed: text, numbers, true, false, null, "
                "lists, and mappings with text as keys. Convert it, or type "
                "rollout.agent_mode=inline"
            )


class WorkerAgents(WorkerPool):
    """All agents of a configuration and the workers that run them, once they are started."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._specs = list_agent_specs(config)
        rollout, limits = config.rollout, config.rollout.subprocess
        max_gib = limits.max_memory_gib
        self._log = WorkerLog()
        super().__init__(
            rollout.count_agent_processes(),
            partial(AgentWorker, self._log, max_gib, limits.modules),
            max_tasks=limits.max_tasks,
        )
        self._max_memory_bytes = None if max_gib is None else int(max_gib * 2**30)
        self._starting = threading.Lock()
        self._problem: UserInputError | None = None
        self.agents: dict[str | None, RemoteAgent] = {}
        """The agents by name; empty: the workers are not started."""

    def start(self) -> bool:
        """Has agents run in workers from now on; blocks. False: it was done before.

        Raises:
            UserInputError: an agent cannot be built; found out in a process of its own.
            RunError: no process can be started.
        """
        with self._starting:
            if self._problem is not None:
                raise self._problem
            if self.agents:
                return False
            try:
                for spec in self._specs.values():
                    _check_kwargs(spec)
                traits = self._try_agents(list(self._specs.values()))
            except UserInputError as error:
                self._problem = error
                raise
            found = zip(self._specs.items(), traits, strict=True)
            self.agents = {name: RemoteAgent(spec, **told) for (name, spec), told in found}
            if self._max_memory_bytes is not None:
                watching = partial(self._watch_memory, self._max_memory_bytes)
                threading.Thread(target=watching, name="memory of agents", daemon=True).start()
            return True

    def log_to(self, folder: Path) -> None:
        """Says where what agents print is kept."""
        self._log.open(folder / LOG_NAME)

    def close(self) -> None:
        """Ends the workers; may be called twice."""
        super().close()
        self._log.close()

    def _try_agents(self, specs: list[AgentSpec]) -> list[dict[str, Any]]:
        """What the agents are, found out in the first worker."""
        where = f"{', '.join(spec.key for spec in specs)}: while the builder was tried in a "
        where += "process of its own"
        worker = self._start()
        try:
            worker.wait_until_idle(_START_SECONDS)
        except (AgentProcessError, TimeoutError) as error:
            raise RunError(f"no process for an agent can be started: {error}") from error
        try:
            traits = worker.try_agents(specs, _TRIAL_SECONDS)
            is_reusable = worker.wait_until_idle(_SETTLE_SECONDS)
        except TimeoutError:
            raise BuilderError(f"{where}, it did not end in {_TRIAL_SECONDS:g} seconds") from None
        except AgentProcessError as error:
            raise BuilderError(f"{where}: {error}") from error
        if is_reusable:
            self._idle.append(worker)
        else:
            self._discard(worker)
        return traits

    def _watch_memory(self, max_bytes: int) -> None:
        """Kills workers that take too much, until the pool is closed."""
        num_looks = 0
        while not self._is_closed.wait(_MEMORY_SECONDS):
            num_looks += 1
            workers = list(self.workers)
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
    for where, value in find_unsendable(spec.kwargs):
        raise ConfigError(
            f"{key}{where}: {value!r} is {type(value).__name__}, which does not reach an agent in "
            "another process as it is. Write it in quotes, so that it is text, or type "
            "rollout.agent_mode=inline"
        )
