"""Runs trajectories: those of an evaluation, and those of training ahead of the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RunError
from agentrl_cli.log import Observer, SilentObserver, format_count
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rollout_failures import check_batch_worked
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.trajectory_pool import OnFinished, TrajectoryPool
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow

_DESCRIBE_SET_ASIDE = (
    "all trajectories of its last groups failed through their surroundings "
    "(rollout.max_failed_groups)"
)


async def run_tasks(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tasks: Sequence[Task],
    *,
    n_samples: int,
    max_concurrent: int,
    min_concurrent: int | None = None,
    max_retries: int = 0,
    step: int = 0,
    on_finished: OnFinished | None = None,
) -> list[Trajectory]:
    """``n_samples`` trajectories of every task, in the order of the tasks.

    :class:`TrajectoryPool` says how many run at a time, and what is made again. ``on_finished`` is
    called with each as it ends. What it raises ends everything.

    Raises:
        RolloutFailedError: every trajectory failed in the same way.
        UserInputError: a mistake that would repeat itself in every trajectory.
    """
    finished: dict[str, Trajectory] = {}

    def keep(trajectory: Trajectory) -> None:
        finished[trajectory.id] = trajectory
        if on_finished is not None:
            on_finished(trajectory)

    pool = TrajectoryPool(
        workflow,
        engine,
        keep,
        max_concurrent=max_concurrent,
        min_concurrent=min_concurrent,
        max_retries=max_retries,
    )
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
        max_concurrent, min_concurrent, max_retries: see :class:`TrajectoryPool`.
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
        min_concurrent: int | None = None,
        max_retries: int = 0,
        on_finished: OnFinished | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.planner = planner
        self._on_finished = on_finished
        self._observer = observer or SilentObserver()
        self._version: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.pool = TrajectoryPool(
            workflow,
            engine,
            self._keep,
            max_concurrent=max_concurrent,
            min_concurrent=min_concurrent,
            max_retries=max_retries,
        )
        self._changed = self.pool.changed
        self._feeder: asyncio.Task[None] | None = None
        self._closed = False

    def set_policy_version(self, version: int) -> None:
        """Tells that the engine now samples with ``version``. May be called from any thread."""
        self._version = version
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._publish)

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
        self._report_set_aside()
        if not trajectories:
            raise RunError(
                f"step {step}: all of its tasks were set aside: {_DESCRIBE_SET_ASIDE}. Mend what "
                "they need and resume the run, or leave them out of train_dataset"
            )
        check_batch_worked(trajectories, f"step {step}")
        return trajectories

    async def close(self) -> None:
        """Cancels what runs and waits until it has ended; may be called twice."""
        self._closed = True
        self._changed.set()
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.wait({self._feeder})
        await self.pool.close()

    def _publish(self) -> None:
        assert self._version is not None
        self.planner.publish(self._version)
        self._changed.set()

    async def _feed(self) -> None:
        """Starts every trajectory of the run."""
        try:
            while self.pool.error is None:
                await self.pool.wait_for_room()
                # Chosen now: an earlier one may have come to be made meanwhile.
                while (attempt := self.planner.start()) is None and self.pool.error is None:
                    self._changed.clear()
                    await self._changed.wait()
                if attempt is not None:
                    self.pool.launch(attempt)
        except Exception as error:
            self.pool.fail(error)

    def _keep(self, trajectory: Trajectory) -> None:
        if self._on_finished is not None:
            self._on_finished(trajectory)
        self.planner.finish(trajectory)
        self._changed.set()

    def _report(self) -> None:
        num_replaced = self.planner.num_replaced
        note = f"{format_count(num_replaced, 'group')} replaced" if num_replaced else ""
        self._observer.on_progress(self.planner.count_finished(), note)

    def _report_set_aside(self) -> None:
        for task_id, failure in self.planner.set_aside.items():
            self._observer.on_message(
                f"task {task_id} (its row, counted from 0) is set aside: {_DESCRIBE_SET_ASIDE}, "
                f"the last one at the boundary '{failure.boundary}' with {failure.kind}: "
                f"{failure.message[:200]}. When the run is resumed it is tried again; "
                "rollout.max_failed_groups=null sets none aside"
            )

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
        if self.pool.error is not None:
            raise self.pool.error
        if self._closed:
            raise RunError("the rollout scheduler was closed")
