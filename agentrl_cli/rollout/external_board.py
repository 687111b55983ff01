"""The board of tasks that wait for programs elsewhere, and the sessions that they have."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl_cli.errors import RunError
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.tracking.admin import AdminError, Lease, SessionEnd, Wish

if TYPE_CHECKING:
    from agentrl_cli.rollout.external import ExternalLease

#: From a taken offer to its open session: nothing but the making of a client.
_OPEN_SECONDS = 30.0
_MAX_PAST = 10_000


@dataclass(slots=True, eq=False)
class TaskOffer:
    """An attempt that waits for a program, or has found one."""

    attempt: Attempt
    split: str
    shown_group_id: str
    taken: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    opened: asyncio.Future[Lease] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_deserted: bool = False
    """True: the program that took it waits no more."""


@dataclass(frozen=True, slots=True)
class _OwnGroup:
    """A group of a program's own, in the place of one of the dataset."""

    group_id: str
    row: Mapping[str, Any]


class TaskBoard:
    """Gives waiting attempts to programs that ask; belongs to one event loop.

    Args:
        max_wait_seconds: longest time in which nobody asks for what waits; None: any.
        max_sessions: most sessions that are open at once.
    """

    def __init__(self, *, max_wait_seconds: float | None, max_sessions: int) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._max_sessions = max_sessions
        self._waiting: list[TaskOffer] = []
        self._open: dict[str, ExternalLease] = {}
        self._past: OrderedDict[str, str] = OrderedDict()
        self._own_groups: dict[str, _OwnGroup] = {}
        self._own_names: dict[str, str] = {}
        self._begun_groups: set[str] = set()
        self._changed = asyncio.Event()
        self._asked_at = time.monotonic()
        self._is_closed = False

    # -- for workflows --------------------------------------------------------------------

    async def wait_for_taker(self, attempt: Attempt, split: str) -> TaskOffer:
        """The attempt's offer, when a program has taken it; its task may be the program's own.

        Raises:
            RunError: nobody has asked for a task for too long.
        """
        offer = TaskOffer(attempt, split, attempt.task.group_id)
        self._dress(offer)
        # The oldest first: its step waits for it.
        bisect.insort(self._waiting, offer, key=_order)
        self._wake()
        waiting_since = time.monotonic()
        try:
            while not offer.taken.done():
                await asyncio.wait({offer.taken}, timeout=self._find_patience(waiting_since))
                if not offer.taken.done() and self._find_patience(waiting_since) == 0:
                    raise RunError(
                        f"no program has asked for a task for {self._max_wait_seconds:g} s "
                        "(rollout.external.max_wait_seconds). Start the program, or see why it "
                        "stopped, then type the same command again: the run goes on"
                    )
        finally:
            if offer in self._waiting:
                self._waiting.remove(offer)
        return offer

    def open(self, lease: ExternalLease, offer: TaskOffer) -> None:
        """Hands the session to the program that took the offer."""
        self._open[lease.session.id] = lease
        if offer.is_deserted:
            lease.end(None)
        elif not offer.opened.done():
            offer.opened.set_result(lease)

    def close(self, lease: ExternalLease, state: str) -> None:
        """Remembers how a session ended."""
        self._asked_at = time.monotonic()
        self._open.pop(lease.session.id, None)
        self._past[lease.session.id] = state
        if len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)

    def fail(self, offer: TaskOffer) -> None:
        """Tells a program whose session never opened that it will not."""
        if not offer.opened.done():
            offer.opened.set_exception(
                AdminError(503, "not_opened", "the session could not be opened: the run ends")
            )

    # -- for programs ---------------------------------------------------------------------

    async def start(self, wish: Wish) -> Lease:
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
        offer = await self._take(wish, time.monotonic() + wish.wait_seconds)
        try:
            done, _ = await asyncio.wait({offer.opened}, timeout=_OPEN_SECONDS)
        except asyncio.CancelledError:
            offer.is_deserted = True
            raise
        if not done:
            offer.is_deserted = True
            raise AdminError(503, "not_opened", "the session was not opened in time: ask again")
        return offer.opened.result()

    def find(self, session_id: str) -> Lease:
        """A session that is open. Raises AdminError for others."""
        return self._find(session_id)

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
            self._find(session_id).end(end)

    def abandon(self, session_id: str) -> None:
        """Gives a session's task back to the board."""
        if self._past.get(session_id) != "abandoned":
            self._find(session_id).end(None)

    def stop(self) -> None:
        """Gives out no more: whoever waits is told so."""
        self._is_closed = True
        self._wake()

    def summarize(self) -> dict[str, Any]:
        """How many sessions are open and tasks wait."""
        return {"num_open_sessions": len(self._open), "num_waiting_tasks": len(self._waiting)}

    # -------------------------------------------------------------------------------------

    def _find(self, session_id: str) -> ExternalLease:
        lease = self._open.get(session_id)
        if lease is None:
            state = self.find_state(session_id)
            raise AdminError(409, f"session_{state}", f"this session is not open: it has {state}")
        return lease

    async def _take(self, wish: Wish, deadline: float) -> TaskOffer:
        while True:
            if self._is_closed:
                raise AdminError(503, "run_ended", "the run has ended: no task will come")
            changed = self._changed
            offer = self._choose(wish)
            if offer is not None:
                self._waiting.remove(offer)
                self._begun_groups.add(offer.attempt.task.group_id)
                offer.taken.set_result(None)
                return offer
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._describe_none(wish)
            try:
                await asyncio.wait_for(changed.wait(), left)
            except TimeoutError:
                continue

    def _choose(self, wish: Wish) -> TaskOffer | None:
        if wish.group_id is not None:
            return self._choose_for_group(wish, wish.group_id)
        if wish.task_id is None:
            return self._waiting[0] if self._waiting else None
        for offer in self._waiting:
            if offer.attempt.task.task_id == wish.task_id:
                return offer
        return None

    def _choose_for_group(self, wish: Wish, name: str) -> TaskOffer | None:
        """An offer of the program's own group; a group of the dataset gives way to a new one."""
        if name not in self._own_groups:
            if wish.task is None:
                raise AdminError(
                    404, "unknown_group", f"no group {name!r} was begun: give its task as well"
                )
            if not isinstance(wish.task.get("agent_name"), str | None):
                raise AdminError(400, "invalid_task", "agent_name must be text")
            group_id = self._find_untouched_group()
            if group_id is None:
                return None
            self._own_groups[name] = _OwnGroup(group_id, dict(wish.task))
            self._own_names[group_id] = name
            for offer in self._waiting:
                self._dress(offer)
        group = self._own_groups[name]
        if wish.task is not None and dict(wish.task) != group.row:
            raise AdminError(
                409, "other_task", f"the group {name!r} was begun with another task: a group is one"
            )
        for offer in self._waiting:
            if offer.attempt.task.group_id == group.group_id:
                return offer
        return None

    def _find_untouched_group(self) -> str | None:
        for offer in self._waiting:
            group_id = offer.attempt.task.group_id
            if offer.split == "train" and group_id not in self._begun_groups:
                return group_id
        return None

    def _dress(self, offer: TaskOffer) -> None:
        """Puts the program's own task into an offer of its group."""
        name = self._own_names.get(offer.attempt.task.group_id)
        if name is None:
            return
        attempt = offer.attempt
        row = self._own_groups[name].row
        task = Task(task_id=name, row=row, group_id=attempt.task.group_id)
        offer.attempt = Attempt(task=task, sample_index=attempt.sample_index, step=attempt.step)
        offer.shown_group_id = name

    def _describe_none(self, wish: Wish) -> AdminError:
        if wish.group_id in self._own_groups:
            return AdminError(
                409,
                "group_is_full",
                f"every attempt of the group {wish.group_id!r} is taken (gconfig.n_samples of "
                "them make a group): begin another group",
            )
        what = "no task" if wish.task_id is None else f"no task {wish.task_id!r}"
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
        self._changed.set()
        self._changed = asyncio.Event()


def _order(offer: TaskOffer) -> tuple[int, str, int]:
    attempt = offer.attempt
    return attempt.step, attempt.task.group_id, attempt.sample_index
