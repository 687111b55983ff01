"""Tasks that wait for programs elsewhere, and the sessions of those programs."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import RunError
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.external.session_routes import (
    AdminError,
    SessionEnd,
    SessionRequest,
)
from agentrl_cli.rollout.workflow import Attempt

if TYPE_CHECKING:
    from agentrl_cli.rollout.external.external_workflow import ExternalSession

#: From a taken task to its open session; all that happens is that a client is made.
_OPEN_SECONDS = 30.0
_MAX_PAST = 10_000


@dataclass(slots=True, eq=False)
class PendingTask:
    """An attempt that waits for a program, or has found one."""

    attempt: Attempt
    split: str
    shown_group_id: str
    taken: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    opened: asyncio.Future[ExternalSession] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_abandoned: bool = False
    """True: the program that took it no longer waits."""


@dataclass(frozen=True, slots=True)
class _OwnGroup:
    """A group of a program's own, in the place of one of the dataset."""

    group_id: str
    row: Mapping[str, Any]


class TaskQueue:
    """Gives pending attempts to programs that ask; belongs to one event loop.

    Args:
        max_wait_seconds: longest time in which nobody asks for what waits; None: any.
        max_sessions: maximum number of sessions that are open at the same time.
    """

    def __init__(self, *, max_wait_seconds: float | None, max_sessions: int) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._max_sessions = max_sessions
        self._pending: list[PendingTask] = []
        self._open: dict[str, ExternalSession] = {}
        self._past: OrderedDict[str, str] = OrderedDict()
        self._own_groups: dict[str, _OwnGroup] = {}
        self._own_names: dict[str, str] = {}
        self._begun_groups: set[str] = set()
        self._changed = asyncio.Event()
        self._asked_at = time.monotonic()
        self._is_closed = False

    # -- for workflows --------------------------------------------------------------------

    async def wait_for_program(self, attempt: Attempt, split: str) -> PendingTask:
        """The attempt, once a program has taken it; its task may be the program's own.

        Raises:
            RunError: nobody has asked for a task for too long.
        """
        pending = PendingTask(attempt, split, attempt.task.group_id)
        self._set_own_task(pending)
        # The oldest first: its step waits for it.
        bisect.insort(self._pending, pending, key=_order)
        self._wake()
        waiting_since = time.monotonic()
        try:
            while not pending.taken.done():
                await asyncio.wait({pending.taken}, timeout=self._find_patience(waiting_since))
                if not pending.taken.done() and self._find_patience(waiting_since) == 0:
                    raise RunError(
                        f"no program has asked for a task for {self._max_wait_seconds:g} s "
                        "(rollout.external.max_wait_seconds). Start the program, or see why it "
                        "stopped, then type the same command again: the run resumes"
                    )
        finally:
            if pending in self._pending:
                self._pending.remove(pending)
        return pending

    def open(self, session: ExternalSession, pending: PendingTask) -> None:
        """Hands the session to the program that took the task."""
        self._open[session.session.id] = session
        if pending.is_abandoned:
            session.end(None)
        elif not pending.opened.done():
            pending.opened.set_result(session)

    def close(self, session: ExternalSession, state: str) -> None:
        """Remembers how a session ended."""
        self._asked_at = time.monotonic()
        self._open.pop(session.session.id, None)
        self._past[session.session.id] = state
        if len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)

    def fail(self, pending: PendingTask) -> None:
        """Tells a program whose session never opened that it will not."""
        if not pending.opened.done():
            pending.opened.set_exception(
                AdminError(503, "not_opened", "the session could not be opened: the run ends")
            )

    # -- for programs ---------------------------------------------------------------------

    async def start(self, asked: SessionRequest) -> ExternalSession:
        """A session for a task that waits, as soon as one does.

        Raises:
            AdminError: none came in time, or what was asked for cannot be had.
        """
        self._asked_at = time.monotonic()
        if len(self._open) >= self._max_sessions:
            raise AdminError(
                429,
                "too_many_sessions",
                f"{self._max_sessions} sessions are open (rollout.max_concurrent): end one first",
            )
        pending = await self._take(asked, time.monotonic() + asked.wait_seconds)
        try:
            done, _ = await asyncio.wait({pending.opened}, timeout=_OPEN_SECONDS)
        except asyncio.CancelledError:
            pending.is_abandoned = True
            raise
        if not done:
            pending.is_abandoned = True
            raise AdminError(503, "not_opened", "the session was not opened in time: ask again")
        return pending.opened.result()

    def find(self, session_id: str) -> ExternalSession:
        """A session that is open. Raises AdminError for others."""
        session = self._open.get(session_id)
        if session is None:
            state = self.find_state(session_id)
            raise AdminError(409, f"session_{state}", f"this session is not open: it has {state}")
        return session

    def find_state(self, session_id: str) -> str:
        """``open``, ``ended``, ``abandoned`` or ``expired``. Raises AdminError for others."""
        if session_id in self._open:
            return "open"
        if session_id not in self._past:
            raise AdminError(404, "unknown_session", "there is no session of this id")
        return self._past[session_id]

    def end(self, session_id: str, end: SessionEnd) -> None:
        """Ends a session; once more for one that has ended does nothing."""
        if self._past.get(session_id) != "ended":
            self.find(session_id).end(end)

    def abandon(self, session_id: str) -> None:
        """Gives a session's task back to the queue."""
        if self._past.get(session_id) != "abandoned":
            self.find(session_id).end(None)

    def stop(self) -> None:
        """Gives out no more tasks, and says so to whoever waits for one."""
        self._is_closed = True
        self._wake()

    def summarize(self) -> dict[str, Any]:
        """How many sessions are open and tasks wait."""
        return {"num_open_sessions": len(self._open), "num_pending_tasks": len(self._pending)}

    # -------------------------------------------------------------------------------------

    async def _take(self, asked: SessionRequest, deadline: float) -> PendingTask:
        while True:
            if self._is_closed:
                raise AdminError(503, "run_ended", "the run has ended: no task will come")
            pending = self._choose(asked)
            if pending is not None:
                self._pending.remove(pending)
                self._begun_groups.add(pending.attempt.task.group_id)
                pending.taken.set_result(None)
                return pending
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._describe_none(asked)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _choose(self, asked: SessionRequest) -> PendingTask | None:
        if asked.group_id is not None:
            return self._choose_for_group(asked, asked.group_id)
        if asked.task_id is None:
            return self._pending[0] if self._pending else None
        for pending in self._pending:
            if pending.attempt.task.task_id == asked.task_id:
                return pending
        return None

    def _choose_for_group(self, asked: SessionRequest, name: str) -> PendingTask | None:
        """A pending task of the program's own group; a new group takes the place of a dataset's."""
        if name not in self._own_groups:
            if asked.task is None:
                raise AdminError(
                    404, "unknown_group", f"no group {name!r} was begun: give its task as well"
                )
            if not isinstance(asked.task.get("agent_name"), str | None):
                raise AdminError(400, "invalid_task", "agent_name must be text")
            group_id = self._find_untouched_group()
            if group_id is None:
                return None
            self._own_groups[name] = _OwnGroup(group_id, dict(asked.task))
            self._own_names[group_id] = name
            for pending in self._pending:
                self._set_own_task(pending)
        group = self._own_groups[name]
        if asked.task is not None and dict(asked.task) != group.row:
            raise AdminError(
                409, "other_task", f"the group {name!r} was begun with another task: a group is one"
            )
        for pending in self._pending:
            if pending.attempt.task.group_id == group.group_id:
                return pending
        return None

    def _find_untouched_group(self) -> str | None:
        for pending in self._pending:
            group_id = pending.attempt.task.group_id
            if pending.split == "train" and group_id not in self._begun_groups:
                return group_id
        return None

    def _set_own_task(self, pending: PendingTask) -> None:
        """Puts the program's own task into an attempt of its group."""
        name = self._own_names.get(pending.attempt.task.group_id)
        if name is None:
            return
        attempt = pending.attempt
        row = self._own_groups[name].row
        task = Task(task_id=name, row=row, group_id=attempt.task.group_id)
        pending.attempt = Attempt(task=task, sample_index=attempt.sample_index, step=attempt.step)
        pending.shown_group_id = name

    def _describe_none(self, asked: SessionRequest) -> AdminError:
        if asked.group_id in self._own_groups:
            return AdminError(
                409,
                "group_is_full",
                f"every attempt of the group {asked.group_id!r} is taken (gconfig.n_samples of "
                "them make a group): begin another group",
            )
        what = "no task" if asked.task_id is None else f"no task {asked.task_id!r}"
        return AdminError(
            503,
            "no_task",
            f"{what} waits at this moment: all are taken, or the model is being updated. Ask again",
        )

    def _find_patience(self, waiting_since: float) -> float | None:
        """Seconds until the wait for programs is over; None: it never is."""
        if self._max_wait_seconds is None:
            return None
        if self._open:
            return self._max_wait_seconds
        since = max(waiting_since, self._asked_at)
        return max(0.0, since + self._max_wait_seconds - time.monotonic())

    def _wake(self) -> None:
        """Lets everybody who waits look again."""
        self._changed.set()
        self._changed.clear()


def _order(pending: PendingTask) -> tuple[int, str, int]:
    attempt = pending.attempt
    return attempt.step, attempt.task.group_id, attempt.sample_index
