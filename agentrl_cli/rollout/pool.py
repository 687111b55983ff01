"""Trajectories in progress: started one by one, all of them ended or cancelled with the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow

_log = get_logger(__name__)

OnFinished = Callable[[Trajectory], None]


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
        self.on_failed: Callable[[], None] = _ignore
        """Called when ``error`` is set."""

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
            self.on_failed()
        else:
            _log.debug("a further trajectory raised", exc_info=error)


def _ignore() -> None:
    """Nobody waits."""
