"""Trajectories in progress: as many at a time as keep the engine busy, and few more.

A trajectory that waits for a seat at the engine gains nothing and costs much: its prompt's cache is
evicted before its next call, and with ``max_staleness`` its tokens age. One too few leaves a seat
empty. How many agents fill the seats depends on how long they spend in tools, which nobody knows
before; so the limit follows what the engine says of itself.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from agentrl_cli.engine.protocol import EngineLoad, InferenceEngine
from agentrl_cli.log import get_logger
from agentrl_cli.records import Boundary, FailureCause, Trajectory
from agentrl_cli.rollout.workflow import Attempt, RolloutWorkflow

_log = get_logger(__name__)

OnFinished = Callable[[Trajectory], None]

#: How often the load is read.
_UPDATE_SECONDS = 1.0
#: Before the first retry, at most; before each further one twice as long, up to a limit.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 4.0, 60.0
#: Calls for each seat: a few wait, so that a seat which becomes free is taken at once.
_CALLS_PER_SEAT = 1.1
#: A limit that is far off is approached in steps, since what is measured lags behind.
_MAX_FALL, _MAX_RISE = 0.7, 1.5
#: Of what was measured before, in the share of its time that a trajectory spends at the engine.
_MEMORY = 0.8
#: By so much, from one update to the next, more calls are tried than memory was seen for.
_MEMORY_GROWTH = 1.05
#: Calls that wait while more than this share of the memory is taken wait for memory. (Others may
#: have come since the engine's last step.)
_FULL = 0.9


@dataclass(slots=True)
class ConcurrencyLimit:
    """A limit between ``floor`` and ``ceiling`` that follows the engine's load."""

    floor: int
    ceiling: int
    value: int = field(init=False)
    """Trajectories that may run at a time."""
    _num_seats: int = 0
    _share: float = math.nan
    """Of its time, how much a trajectory spends in calls, waiting included."""
    _capacity: float = math.inf
    """Calls that the engine was seen to have memory for."""

    def __post_init__(self) -> None:
        self.value = self.ceiling

    def update(self, num_running: int, load: EngineLoad) -> int:
        """The limit from now on.

        Args:
            num_running: trajectories in progress.
            load: of all servers together.
        """
        if not self._num_seats:
            # As if agents did nothing but call the model: more are let in as their pauses show.
            self._num_seats = load.num_seats
            self.value = self._clamp(math.ceil(load.num_seats * _CALLS_PER_SEAT))
        # Probes are calls of no trajectory, and a publication holds all calls. And after a fall,
        # more run than may until they end: what is measured is not yet its effect.
        if not (load.num_running and num_running) or num_running > self.value:
            return self.value
        share = min(1.0, (load.num_running + load.num_waiting) / num_running)
        known = share if math.isnan(self._share) else self._share
        self._share = _MEMORY * known + (1 - _MEMORY) * share
        # (What vLLM counts as preempted says less: a publication preempts all calls.)
        if load.num_waiting and load.cache_use > _FULL:
            self._capacity = max(1, load.num_running)
        else:
            # How long contexts are changes.
            self._capacity *= _MEMORY_GROWTH
        wanted = min(load.num_seats, self._capacity) * _CALLS_PER_SEAT
        change = min(max(wanted / self._share / self.value, _MAX_FALL), _MAX_RISE)
        # Whether more would be used is unknown while even the present limit is not reached.
        if change < 1 or num_running == self.value:
            changed = self.value * change
            rounded = math.ceil(changed) if change > 1 else math.floor(changed)
            self.value = self._clamp(rounded)
        return self.value

    def _clamp(self, value: int) -> int:
        return min(max(value, self.floor), self.ceiling)


class TrajectoryPool:
    """Runs attempts on one workflow, only so many at once.

    The first exception that is not data (a mistake of the user's, a full disk) is kept in
    ``error``, and nothing further is started.

    Args:
        workflow: makes a trajectory.
        engine: samples.
        on_finished: called with each trajectory as it ends.
        max_concurrent: how many may be in progress at the same time.
        min_concurrent: their number follows the engine's load, between this and that; None: it
            does not.
        max_retries: how often one that failed through its surroundings is made again.
    """

    def __init__(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        on_finished: OnFinished,
        *,
        max_concurrent: int,
        min_concurrent: int | None = None,
        max_retries: int = 0,
    ) -> None:
        floor = min(min_concurrent or max_concurrent, max_concurrent)
        self.limit = ConcurrencyLimit(floor, max_concurrent)
        self.error: BaseException | None = None
        self.changed = asyncio.Event()
        """Set with ``error``, for who waits on it."""
        self._workflow = workflow
        self._engine = engine
        self._on_finished = on_finished
        self._running: set[asyncio.Task[None]] = set()
        self._room = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None
        self._max_retries = max_retries
        self._num_retries = 0
        self._has_worked = False

    @property
    def num_running(self) -> int:
        """Trajectories in progress."""
        return len(self._running)

    def take_num_retries(self) -> int:
        """How often a trajectory was made again since the last call."""
        taken, self._num_retries = self._num_retries, 0
        return taken

    async def start(self, attempt: Attempt) -> None:
        """Starts an attempt as soon as there is room; returns when it has started."""
        await self.wait_for_room()
        self.launch(attempt)

    async def wait_for_room(self) -> None:
        """Returns when one more may run: one that who waits then gives to :meth:`launch`."""
        if self._follower is None and self.limit.floor < self.limit.ceiling:
            await self._read_load()
            self._follower = asyncio.create_task(self._follow_load(), name="engine load")
        while self.num_running >= self.limit.value and self.error is None:
            self._room.clear()
            await self._room.wait()

    def launch(self, attempt: Attempt) -> None:
        """Starts an attempt, for which there is room."""
        if self.error is not None:
            return
        task = asyncio.create_task(self._run(attempt), name=f"trajectory {attempt.id}")
        self._running.add(task)
        task.add_done_callback(self._forget)

    async def drain(self) -> None:
        """Waits for everything in progress; at most until an exception that is not data."""
        while self._running and self.error is None:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    async def close(self, timeout_seconds: float = 30.0) -> None:
        """Cancels what runs and waits until it has ended."""
        running = {*self._running, *(() if self._follower is None else (self._follower,))}
        for task in running:
            task.cancel()
        if running:
            _, pending = await asyncio.wait(running, timeout=timeout_seconds)
            for task in pending:
                _log.warning("%s did not end when it was cancelled", task.get_name())

    def fail(self, error: BaseException) -> None:
        """Ends the pool's work for an exception that is not data."""
        if self.error is None:
            self.error = error
            self.changed.set()
            self._room.set()
        else:
            _log.debug("a further trajectory raised", exc_info=error)

    async def _run(self, attempt: Attempt) -> None:
        try:
            self._on_finished(await self._make(attempt))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fail(error)

    async def _make(self, attempt: Attempt) -> Trajectory:
        """The trajectory, or its last try: each begins later than the one before it."""
        for number in range(self._max_retries + 1):
            trajectory = await self._workflow.arun_trajectory(self._engine, attempt)
            self._has_worked |= trajectory.failure is None or trajectory.is_policy_failure
            if number == self._max_retries or not self._may_be_retried(trajectory):
                break
            attempt = replace(attempt, earlier=trajectory.interactions)
            self._num_retries += 1
            _log.info("%s is made again: %s", attempt.id, trajectory.failure)
            # Who failed together would come back together.
            pause = min(_FIRST_PAUSE_SECONDS * 2**number, _MAX_PAUSE_SECONDS)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        return trajectory

    def _may_be_retried(self, trajectory: Trajectory) -> bool:
        """Whether another try may end otherwise. One that ran out of time would take as long again,
        and where nothing has ever worked, the mistake is the user's."""
        failure = trajectory.failure
        return (
            self._has_worked
            and failure is not None
            and failure.cause is FailureCause.SURROUNDINGS
            and failure.boundary is not Boundary.TIMEOUT
        )

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._room.set()

    async def _follow_load(self) -> None:
        try:
            while True:
                await asyncio.sleep(_UPDATE_SECONDS)
                await self._read_load()
        except Exception as error:
            self.fail(error)

    async def _read_load(self) -> None:
        load = await self._engine.read_load()
        if load is not None:
            self.limit.update(self.num_running, load)
            self._room.set()
