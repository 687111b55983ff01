"""Runs trajectories: those of an evaluation, and those of training ahead of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RunError
from agentrl_cli.log import Observer, SilentObserver, format_count, get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rollout_failures import check_batch_worked
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow

_log = get_logger(__name__)

OnFinished = Callable[[Trajectory], None]


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
    # The samples of a group are neighbours, so they share prefixes.
    attempts = [
        Attempt(task=task, sample_index=index, step=step)
        for task in tasks
        for index in range(n_samples)
    ]
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
    """Makes the trajectories that a :class:`StepPlanner` admits, and gives its steps.

    All methods but :meth:`set_policy_version` belong to one event loop.

    Args:
        workflow: makes a trajectory.
        engine: samples.
        planner: decides what starts and what a step is made of.
        max_concurrent: trajectories in progress at the same time.
        on_finished: called with each trajectory as it ends; what it raises ends the run.
        observer: hears how far the step that the trainer waits for is.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        planner: StepPlanner,
        *,
        max_concurrent: int,
        on_finished: OnFinished | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.planner = planner
        self._on_finished = on_finished
        self._observer = observer or SilentObserver()
        self._version: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pool = TrajectoryPool(workflow, engine, max_concurrent, self._keep)
        self._changed = self._pool.changed
        self._feeder: asyncio.Task[None] | None = None
        self._closed = False

    def set_policy_version(self, version: int) -> None:
        """Tells that the engine now samples with ``version``. May be called from any thread."""
        self._version = version
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._publish)

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
            RunError: the batch cannot be had: it is another step's turn, the weights before it
                were not published, or the scheduler was closed.
        """
        self._raise_error()
        self._check_turn(step)
        if self._feeder is None:
            self._loop = asyncio.get_running_loop()
            self._publish()
            self._feeder = asyncio.create_task(self._feed(), name="rollout scheduler")
        while (trajectories := self.planner.take_step()) is None:
            self._report()
            self._changed.clear()
            await self._changed.wait()
            self._raise_error()
        check_batch_worked(trajectories, f"step {step}")
        return trajectories

    async def close(self) -> None:
        """Cancels what runs and waits until it has ended; may be called twice."""
        self._closed = True
        self._changed.set()
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait({self._feeder})
        await self._pool.close()

    def _publish(self) -> None:
        assert self._version is not None
        self.planner.publish(self._version)
        self._changed.set()

    async def _feed(self) -> None:
        """Starts every trajectory of the run."""
        try:
            while self._pool.error is None:
                await self._pool.wait_for_room()
                # Chosen now: an earlier one may have come to be made meanwhile.
                while (attempt := self.planner.start()) is None and self._pool.error is None:
                    self._changed.clear()
                    await self._changed.wait()
                if attempt is not None:
                    self._pool.launch(attempt)
        except Exception as error:
            self._pool.fail(error)

    def _keep(self, trajectory: Trajectory) -> None:
        if self._on_finished is not None:
            self._on_finished(trajectory)
        self.planner.finish(trajectory)
        self._changed.set()

    def _report(self) -> None:
        num_replaced = self.planner.num_replaced
        note = f"{format_count(num_replaced, 'group')} replaced" if num_replaced else ""
        self._observer.on_progress(self.planner.count_finished(), note)

    def _check_turn(self, step: int) -> None:
        if step != self.planner.next_step:
            raise RunError(
                f"step {step} was asked for, and the next one is {self.planner.next_step}"
            )
        if self._version is None or self._version < step - 1:
            raise RunError(
                f"step {step} is made with policy version {step - 1}, and the last one published "
                f"is {self._version}: it would never begin"
            )

    def _raise_error(self) -> None:
        if self._pool.error is not None:
            raise self._pool.error
        if self._closed:
            raise RunError("the rollout scheduler was closed")


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
