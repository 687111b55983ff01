"""Which trajectory starts when: order, concurrency, staleness and dynamic sampling."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RunError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task, TaskStream, list_outcomes
from agentrl_cli.rollout.rollout_failures import check_batch_worked
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow
from agentrl_cli.scores import compute_group_statistics, compute_score

_log = get_logger(__name__)

OnFinished = Callable[[Trajectory], None]
#: Called with a step and the number of its trajectories that are to be made once more, with
#: other tasks.
OnBackupTask = Callable[[int, int], None]


async def run_tasks(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tasks: Sequence[Task],
    *,
    n_samples: int,
    max_concurrent: int,
    step: int = 0,
    on_finished: OnFinished | None = None,
) -> list[Trajectory]:
    """``n_samples`` trajectories of every task, in the order of the tasks.

    ``on_finished`` is called with each as it ends. What it raises ends everything.

    Raises:
        RolloutFailedError: every trajectory failed in the same way.
        UserInputError: a mistake that would repeat itself in every trajectory.
    """
    finished: dict[str, Trajectory] = {}

    def keep(trajectory: Trajectory) -> None:
        finished[trajectory.id] = trajectory
        if on_finished is not None:
            on_finished(trajectory)

    pool = TrajectoryPool(workflow, engine, max_concurrent, keep)
    attempts = _list_attempts(tasks, n_samples, step)
    try:
        for attempt in attempts:
            await pool.start(attempt)
        await pool.drain()
    finally:
        await pool.close()
    if pool.error is not None:
        raise pool.error
    trajectories = [finished[attempt.id] for attempt in attempts]
    check_batch_worked(trajectories, f"evaluation after step {step}")
    return trajectories


class RolloutScheduler:
    """Makes the batches of a run's steps ahead of the trainer, within ``max_staleness``.

    The policy version after training step k is k, and step k trains on top of version
    k - 1. A trajectory of step k may start when the version is at least
    (k - 1) - max_staleness, so that no token in its batch is older than that; the batch
    is exactly ``stream.batch(k)``: a slow trajectory delays its step and is never dropped.
    Where the stream has backup tasks, they replace groups without signal (:class:`StepGroups`), and
    both are given to the trainer, marked. Earlier steps go before later ones. An attempt that is
    ``already_finished``, by an interrupted run, is not made again.

    All methods but :meth:`set_policy_version` and :meth:`count_cooling` belong to one event loop.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        stream: TaskStream,
        *,
        rollout: RolloutConfig,
        n_samples: int,
        first_step: int,
        last_step: int,
        on_finished: OnFinished | None = None,
        on_backup_task: OnBackupTask | None = None,
        already_finished: Iterable[Trajectory] = (),
    ) -> None:
        self._stream = stream
        self._max_staleness = rollout.max_staleness
        self._n_samples = n_samples
        self._next_step = self._next_opened = first_step
        self._steps = range(first_step, last_step + 1)
        self._on_finished = on_finished
        self._on_backup_task = on_backup_task
        self._policy_version = first_step - 1
        self._open: dict[int, StepGroups] = {}
        self._already_finished = {t.id: t for t in already_finished}
        self._waiting: list[tuple[int, int, Attempt]] = []
        self._ticket = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = TrajectoryPool(workflow, engine, rollout.max_concurrent, self._keep)
        self._changed = self._pool.changed
        self._feeder: asyncio.Task[None] | None = None
        self._closed = False

    def set_policy_version(self, version: int) -> None:
        """Tells that the engine now samples with ``version``. May be called from any thread."""
        self._policy_version = version
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._changed.set)

    @property
    def num_running(self) -> int:
        """Trajectories in progress."""
        return self._pool.num_running

    async def next_batch(self, step: int) -> list[Trajectory]:
        """All trajectories of ``step``, group by group and by sample index; once for each step.

        Those of groups that were replaced are among them and marked: they are to be stored and
        counted, and not trained on.

        Raises:
            RolloutFailedError: every trajectory failed in the same way.
            UserInputError: a mistake that would repeat itself in every trajectory.
            RunError: the batch cannot be had: it is another step's turn, its weights were never
                published, or the scheduler was closed.
        """
        self._raise_error()
        self._check_turn(step)
        if self._feeder is None:
            self._loop = asyncio.get_running_loop()
            self._feeder = asyncio.create_task(self._feed(), name="rollout scheduler")
        self._open_up_to(step)
        groups = self._open[step]
        while not groups.is_complete:
            self._raise_error()
            self._changed.clear()
            await self._changed.wait()
        self._raise_error()
        self._next_step = step + 1
        del self._open[step]
        trajectories = groups.list_trajectories()
        check_batch_worked(trajectories, f"step {step}")
        scores = ((t.group_id, t.task_id, compute_score(t)) for t in trajectories)
        self._stream.observe(step, list_outcomes(scores))
        return trajectories

    def count_cooling(self, step: int) -> int:
        """Tasks that the curriculum left out of the epoch in which ``step``, whose batch was given,
        was chosen. May be called from any thread."""
        return self._stream.count_cooling(step)

    async def close(self) -> None:
        """Cancels what runs and waits until it has ended; may be called twice."""
        self._closed = True
        self._changed.set()
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait({self._feeder})
        await self._pool.close()

    async def _feed(self) -> None:
        """Starts every trajectory of the run, those of earlier steps first."""
        try:
            while self._pool.error is None:
                await self._wait_for_attempt()
                await self._pool.wait_for_room()
                # Chosen now: an earlier step may have come to need another group meanwhile.
                self._pool.launch(heapq.heappop(self._waiting)[-1])
        except Exception as error:
            self._pool.fail(error)

    async def _wait_for_attempt(self) -> None:
        """Returns when there is an attempt to start; opens the next step when it may begin."""
        while not self._waiting:
            step = self._next_opened
            if step in self._steps and self._policy_version >= self._find_oldest_version(step):
                self._open_up_to(step)
                continue
            self._changed.clear()
            await self._changed.wait()

    def _open_up_to(self, step: int) -> None:
        while self._next_opened <= step:
            opened = self._next_opened
            batch, backup_tasks = self._stream.batch(opened), self._stream.backup_tasks(opened)
            groups = StepGroups(opened, batch, backup_tasks, self._n_samples)
            self._open[opened] = groups
            self._next_opened += 1
            self._queue(groups.first_attempts)

    def _queue(self, attempts: Sequence[Attempt]) -> None:
        """Lets attempts wait for their start, those excepted that were made already."""
        pending = list(attempts)
        while pending:
            attempt = pending.pop(0)
            finished = self._already_finished.pop(attempt.id, None)
            # A program's own task is not known to the program that comes after an interruption.
            if finished is not None and finished.task_id == attempt.task.task_id:
                pending.extend(self._count_in(finished))
            else:
                heapq.heappush(self._waiting, (attempt.step, next(self._ticket), attempt))
        self._changed.set()

    def _keep(self, trajectory: Trajectory) -> None:
        self._queue(self._count_in(trajectory))

    def _count_in(self, trajectory: Trajectory) -> list[Attempt]:
        """Takes a trajectory that has ended; the attempts that are to be made for it."""
        if self._on_finished is not None:
            self._on_finished(trajectory)
        further = self._open[trajectory.step].add(trajectory)
        if further and self._on_backup_task is not None:
            self._on_backup_task(trajectory.step, len(further))
        return further

    def _find_oldest_version(self, step: int) -> int:
        """The oldest policy version that may sample for ``step``."""
        return step - 1 - self._max_staleness

    def _check_turn(self, step: int) -> None:
        if step != self._next_step or step not in self._steps:
            raise RunError(
                f"step {step} was asked for, and the next one is {self._next_step} of "
                f"{self._steps.start} to {self._steps.stop - 1}"
            )
        oldest = self._find_oldest_version(step)
        if self._policy_version < oldest:
            raise RunError(
                f"step {step} needs policy version {oldest} or newer (rollout.max_staleness = "
                f"{self._max_staleness}), and the last one published is "
                f"{self._policy_version}: it would never begin"
            )

    def _raise_error(self) -> None:
        if self._pool.error is not None:
            raise self._pool.error
        if self._closed:
            raise RunError("the rollout scheduler was closed")


class StepGroups:
    """The groups of one step, and the backup tasks that replace those without signal.

    A group that has ended without signal is replaced by that of the next backup task, which may
    be replaced in turn, until no backup task is left. Which groups a step comes to have depends
    on how they scored, and not on the order in which they ended: they are the batch, and as many
    backup tasks as there are groups without signal among them, as far as backup tasks reach.

    Args:
        step: the step.
        tasks: its batch.
        backup_tasks: tasks for further groups, in order of use.
        n_samples: trajectories of a group.
    """

    def __init__(
        self, step: int, tasks: Sequence[Task], backup_tasks: Sequence[Task], n_samples: int
    ) -> None:
        self._step = step
        self._n_samples = n_samples
        self._backup_tasks = list(backup_tasks)
        self._groups: dict[str, dict[int, Trajectory]] = {task.group_id: {} for task in tasks}
        self.first_attempts = _list_attempts(tasks, n_samples, step)
        """Those at the batch's tasks."""
        self._replacing: list[str] = []
        self._num_left = len(self.first_attempts)

    @property
    def is_complete(self) -> bool:
        """True when every group has ended, those that replace others included."""
        return self._num_left == 0

    def add(self, trajectory: Trajectory) -> list[Attempt]:
        """Takes a trajectory that has ended; returns attempts at a backup task."""
        group = self._groups[trajectory.group_id]
        group[trajectory.sample_index] = trajectory
        self._num_left -= 1
        if len(group) < self._n_samples or not self._backup_tasks or _has_signal(group):
            return []
        task = self._backup_tasks.pop(0)
        self._replacing.append(task.group_id)
        self._groups[task.group_id] = {}
        self._num_left += self._n_samples
        return _list_attempts([task], self._n_samples, self._step)

    def list_trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group and by sample index, marked where they are replaced.

        The batch's groups come first, then those that replaced others, in order of use. The
        first of them replaced the first group without signal, and so on.
        """
        without_signal = (key for key, group in self._groups.items() if not _has_signal(group))
        replaced_by = dict(zip(without_signal, self._replacing, strict=False))
        return [
            replace(group[index], replaced_by=replaced_by.get(group_id))
            for group_id, group in self._groups.items()
            for index in sorted(group)
        ]


def _has_signal(group: dict[int, Trajectory]) -> bool:
    (statistics,) = compute_group_statistics(group.values()).values()
    return statistics.has_signal


def _list_attempts(tasks: Sequence[Task], n_samples: int, step: int) -> list[Attempt]:
    """Every attempt of a batch; the samples of a group are neighbours, so they share prefixes."""
    return [
        Attempt(task=task, sample_index=index, step=step)
        for task in tasks
        for index in range(n_samples)
    ]


class TrajectoryPool:
    """Runs attempts on one workflow, at most ``max_concurrent`` at once.

    The first exception that is not data (a mistake of the user's, a full disk) is kept in
    ``error``, and nothing further is started.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        max_concurrent: int,
        on_finished: OnFinished,
    ) -> None:
        self._workflow = workflow
        self._engine = engine
        self._slots = asyncio.Semaphore(max_concurrent)
        self._on_finished = on_finished
        self._running: set[asyncio.Task[None]] = set()
        self.error: BaseException | None = None
        self.changed = asyncio.Event()
        """Set with ``error``, for who waits on it."""

    @property
    def num_running(self) -> int:
        """Trajectories in progress."""
        return len(self._running)

    async def start(self, attempt: Attempt) -> None:
        """Starts an attempt as soon as there is room; returns when it has started."""
        await self.wait_for_room()
        self.launch(attempt)

    async def wait_for_room(self) -> None:
        """Returns when one more may run, and keeps its place until :meth:`launch`."""
        await self._slots.acquire()

    def launch(self, attempt: Attempt) -> None:
        """Starts an attempt in the place that :meth:`wait_for_room` has kept."""
        if self.error is not None:
            self._slots.release()
            return
        task = asyncio.create_task(self._run(attempt), name=f"trajectory {attempt.id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def drain(self) -> None:
        """Waits for everything in progress; at most until an exception that is not data."""
        while self._running and self.error is None:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Cancels what runs and waits until it has ended."""
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            _, pending = await asyncio.wait(running, timeout=timeout_seconds)
            for task in pending:
                _log.warning("%s did not end when it was cancelled", task.get_name())

    async def _run(self, attempt: Attempt) -> None:
        try:
            self._on_finished(await self._workflow.arun_trajectory(self._engine, attempt))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fail(error)
        finally:
            self._slots.release()

    def fail(self, error: BaseException) -> None:
        """Ends the pool's work for an exception that is not data."""
        if self.error is None:
            self.error = error
            self.changed.set()
        else:
            _log.debug("a further trajectory raised", exc_info=error)
