"""Tasks that wait for programs elsewhere, and the sessions of those programs."""

from __future__ import annotations

import asyncio
import bisect
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from agentrl_cli.agents.agent_runner import AgentOutcome
from agentrl_cli.errors import RunError
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import parse_reward
from agentrl_cli.tracking.session import Session, read_clock

#: From a taken task to its open session; all that happens is that a client is made.
_OPEN_SECONDS = 30.0
_MAX_PAST = 10_000
#: Of one request for a task, in seconds.
_MAX_WAIT = 60.0


class ExternalAgentError(Exception):
    """The program said that it failed."""


class SessionLostError(Exception):
    """The program gave its session back, or made no request for too long."""


class AdminError(Exception):
    """A request that is refused.

    Attributes:
        status: of HTTP.
        code: for programs.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def _parse_reward(value: Any) -> float | None:
    try:
        return parse_reward(value)
    except TypeError as error:
        # Pydantic lets it pass.
        raise ValueError(str(error)) from None


Reward = Annotated[float | None, BeforeValidator(_parse_reward)]


class ProgramRequest(BaseModel):
    """What a program sends."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SessionRequest(ProgramRequest):
    """Which task a program asks for."""

    task_id: str | None = None
    """A pending task of the dataset; None: the next one."""
    task: dict[str, Any] | None = None
    """A task of its own, in place of one of the dataset."""
    group_id: str | None = None
    """Its own name of the group that trajectories of its task are compared in."""
    wait_seconds: float = 30.0
    """How long to wait for a task."""


class SessionEnd(ProgramRequest):
    """What a program says of a session at its end."""

    reward: Reward = None
    """The outcome's, if it is given at all, None included; else the reward function judges."""
    final_answer: str | None = None
    error: str | None = None
    """Why it failed; None: it did not."""

    @property
    def is_rewarded(self) -> bool:
        """True where a reward was given."""
        return "reward" in self.model_fields_set


class ExternalSession:
    """An attempt that waits for a program, then its session in the hands of that program.

    Args:
        queue: gives it to the program.
        attempt: what it is for; the program may put a task of its own into it.
        split: what the task is for; shown to the program.
        idle_timeout_seconds: without a request for so long, it is lost.
    """

    session: Session
    """Its live side; there once it runs."""

    def __init__(
        self, queue: TaskQueue, attempt: Attempt, split: str, idle_timeout_seconds: float
    ) -> None:
        self.attempt = attempt
        self.split = split
        self.shown_group_id = attempt.task.group_id
        loop = asyncio.get_running_loop()
        self.taken: asyncio.Future[None] = loop.create_future()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.is_abandoned = False
        """True: the program that took it no longer waits."""
        self.is_lost = False
        """True: the program gave it back, or is gone."""
        self._queue = queue
        self._idle_timeout_seconds = idle_timeout_seconds
        self._kept: SessionEnd | None = None
        self._ended: asyncio.Future[SessionEnd | None] = loop.create_future()

    async def run(self, client: TrackingClient) -> AgentOutcome:
        """What the program says at the end.

        Raises:
            ExternalAgentError: it says that it failed.
            SessionLostError: it is gone.
        """
        self.session = client.session
        self._queue.open(self)
        state = "expired"
        try:
            end = await self._wait()
            state = "abandoned" if end is None else "ended"
        finally:
            self._queue.close(self, state)
        if end is None:
            self.is_lost = True
            raise SessionLostError("the program gave the session back")
        if end.error is not None:
            raise ExternalAgentError(end.error)
        returned = None
        if end.is_rewarded:
            # None would ask the reward function; a reward that is not a number leaves it unscored.
            returned = float("nan") if end.reward is None else end.reward
        return AgentOutcome(final_answer=end.final_answer, returned=returned)

    async def _wait(self) -> SessionEnd | None:
        while not self._ended.done():
            left = self._idle_timeout_seconds - self.session.idle_seconds
            if left <= 0:
                self.is_lost = True
                raise SessionLostError(
                    f"the program made no request for {self._idle_timeout_seconds:g} s "
                    "(rollout.external.idle_timeout_seconds)"
                )
            await asyncio.wait({self._ended}, timeout=left)
        return self._ended.result()

    def describe(self) -> dict[str, Any]:
        """Its task and names, for the program."""
        return {
            "trajectory_id": self.attempt.id,
            "group_id": self.shown_group_id,
            "task_id": self.attempt.task.task_id,
            "split": self.split,
            "task": dict(self.attempt.task.row),
        }

    def keep_reward(self, reward: float | None) -> None:
        """Takes the outcome's reward, until the end."""
        self._kept = SessionEnd(reward=reward)

    def end(self, end: SessionEnd | None) -> None:
        """Ends it, with the reward that was given before if there is none now; None: given back."""
        if self._ended.done():
            return
        if end is not None and not end.is_rewarded and self._kept is not None:
            end = end.model_copy(update={"reward": self._kept.reward})
        self._ended.set_result(end)


class TaskQueue:
    """Gives pending attempts to programs that ask; belongs to one event loop.

    Args:
        max_wait_seconds: longest time in which nobody asks for what waits; None: any.
        max_sessions: maximum number of sessions that are open at the same time.
    """

    def __init__(self, *, max_wait_seconds: float | None, max_sessions: int) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._max_sessions = max_sessions
        self._pending: list[ExternalSession] = []
        self._open: dict[str, ExternalSession] = {}
        self._past: OrderedDict[str, str] = OrderedDict()
        self._own_tasks: dict[str, Task] = {}
        """Tasks of programs, by their name of the group; each in the place of a dataset's."""
        self._begun_groups: set[str] = set()
        self._changed = asyncio.Event()
        self._asked_at = read_clock()
        self._is_closed = False

    # -- for workflows --------------------------------------------------------------------

    async def wait_for_program(self, session: ExternalSession) -> None:
        """Returns once a program has taken it; its task may then be the program's own.

        Raises:
            RunError: nobody has asked for a task for too long.
        """
        self._set_own_task(session)
        # The oldest first: its step waits for it.
        bisect.insort(self._pending, session, key=_order)
        self._wake()
        waiting_since = read_clock()
        try:
            while not session.taken.done():
                await asyncio.wait({session.taken}, timeout=self._find_patience(waiting_since))
                if not session.taken.done() and self._find_patience(waiting_since) == 0:
                    raise RunError(
                        f"no program has asked for a task for {self._max_wait_seconds:g} s "
                        "(rollout.external.max_wait_seconds). Start the program, or see why it "
                        "stopped, then type the same command again: the run resumes"
                    )
        finally:
            if session in self._pending:
                self._pending.remove(session)

    def open(self, session: ExternalSession) -> None:
        """Hands the session to the program that took the task."""
        self._open[session.session.id] = session
        if session.is_abandoned:
            session.end(None)
        elif not session.opened.done():
            session.opened.set_result(None)

    def close(self, session: ExternalSession, state: str) -> None:
        """Remembers how a session ended."""
        self._asked_at = read_clock()
        self._open.pop(session.session.id, None)
        self._past[session.session.id] = state
        if len(self._past) > _MAX_PAST:
            self._past.popitem(last=False)

    def fail(self, session: ExternalSession) -> None:
        """Tells a program whose session never opened that it will not."""
        if not session.opened.done():
            session.opened.set_exception(
                AdminError(503, "not_opened", "the session could not be opened: the run ends")
            )

    # -- for programs ---------------------------------------------------------------------

    async def start(self, asked: SessionRequest) -> ExternalSession:
        """A session for a task that waits, as soon as one does.

        Raises:
            AdminError: none came in time, or what was asked for cannot be had.
        """
        self._asked_at = read_clock()
        if len(self._open) >= self._max_sessions:
            raise AdminError(
                429,
                "too_many_sessions",
                f"{self._max_sessions} sessions are open (rollout.max_concurrent): end one first",
            )
        session = await self._take(asked, read_clock() + min(asked.wait_seconds, _MAX_WAIT))
        try:
            done, _ = await asyncio.wait({session.opened}, timeout=_OPEN_SECONDS)
        except asyncio.CancelledError:
            session.is_abandoned = True
            raise
        if not done:
            session.is_abandoned = True
            raise AdminError(503, "not_opened", "the session was not opened in time: ask again")
        session.opened.result()
        return session

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

    async def _take(self, asked: SessionRequest, deadline: float) -> ExternalSession:
        while True:
            if self._is_closed:
                raise AdminError(503, "run_ended", "the run has ended: no task will come")
            session = self._choose(asked)
            if session is not None:
                self._pending.remove(session)
                self._begun_groups.add(session.attempt.task.group_id)
                session.taken.set_result(None)
                return session
            left = deadline - read_clock()
            if left <= 0:
                raise self._describe_none(asked)
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    def _choose(self, asked: SessionRequest) -> ExternalSession | None:
        group_id = None if asked.group_id is None else self._find_group(asked, asked.group_id)
        if asked.group_id is not None and group_id is None:
            return None
        for session in self._pending:
            task = session.attempt.task
            if group_id in (None, task.group_id) and asked.task_id in (None, task.task_id):
                return session
        return None

    def _find_group(self, asked: SessionRequest, name: str) -> str | None:
        """The program's own group; a new one takes the place of a dataset's, if one is left."""
        if name not in self._own_tasks:
            if asked.task is None:
                raise AdminError(
                    404, "unknown_group", f"no group {name!r} was begun: give its task as well"
                )
            if not isinstance(asked.task.get("agent_name"), str | None):
                raise AdminError(400, "invalid_task", "agent_name must be text")
            trained = (s.attempt.task.group_id for s in self._pending if s.split == "train")
            group_id = next((id_ for id_ in trained if id_ not in self._begun_groups), None)
            if group_id is None:
                return None
            self._own_tasks[name] = Task(task_id=name, row=dict(asked.task), group_id=group_id)
            for session in self._pending:
                self._set_own_task(session)
        task = self._own_tasks[name]
        if asked.task is not None and asked.task != task.row:
            raise AdminError(
                409, "other_task", f"the group {name!r} was begun with another task: a group is one"
            )
        return task.group_id

    def _set_own_task(self, session: ExternalSession) -> None:
        """Puts the program's own task into an attempt of its group."""
        for name, task in self._own_tasks.items():
            if task.group_id == session.attempt.task.group_id:
                session.attempt = replace(session.attempt, task=task)
                session.shown_group_id = name

    def _describe_none(self, asked: SessionRequest) -> AdminError:
        if asked.group_id in self._own_tasks:
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
        return max(0.0, since + self._max_wait_seconds - read_clock())

    def _wake(self) -> None:
        """Lets everybody who waits look again."""
        self._changed.set()
        self._changed.clear()


def _order(session: ExternalSession) -> tuple[int, str, int]:
    attempt = session.attempt
    return attempt.step, attempt.task.group_id, attempt.sample_index
