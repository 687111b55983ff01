"""Finds out when code blocks an event loop, and which trajectory's it is."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from agentrl_cli.config.user_code import is_of_user
from agentrl_cli.rollout.background_loop import BackgroundLoop

#: An event loop that is only busy answers sooner.
STALL_SECONDS = 3.0
#: Between two signs of life of a worker.
HEARTBEAT_SECONDS = 1.0
#: Code that holds the interpreter's lock stops a worker's main thread too: then the stacks of all
#: threads are written to its log.
SILENCE_SECONDS = 10.0
_MAX_FRAMES = 12

_trajectory: ContextVar[str | None] = ContextVar("agentrl_trajectory", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An event loop that does not answer, as it is at this moment."""

    seconds: float
    """For how long."""
    trajectory: str | None = None
    """Whose code it executes; None: unknown."""
    stack: str = ""
    """Where that code is, the innermost line last."""


class LoopWatchdog:
    """Watches a background loop from another thread.

    ``stall_seconds``: how long the loop may take to answer.
    """

    def __init__(self, background: BackgroundLoop, stall_seconds: float = STALL_SECONDS) -> None:
        self._background = background
        self._stall_seconds = stall_seconds
        self._asked_at: float | None = None
        self._owners: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()
        background.loop.set_task_factory(self._make_task)

    async def name_trajectory(self, trajectory_id: str) -> None:
        """Says that this task, and all that it starts from now on, is of that trajectory."""
        task = asyncio.current_task()
        assert task is not None
        _trajectory.set(trajectory_id)
        self._owners[task] = trajectory_id

    def look(self) -> Stall | None:
        """How the loop is blocked, if it has been for long. To be asked again and again."""
        now = self._background.loop.time()
        if self._asked_at is None:
            self._asked_at = now
            self._background.post(self._answer)
            return None
        seconds = now - self._asked_at
        if seconds < self._stall_seconds:
            return None
        task = asyncio.current_task(self._background.loop)
        trajectory = self._owners.get(task) if task is not None else None
        return Stall(seconds=seconds, trajectory=trajectory, stack=self._format_stack())

    def _answer(self) -> None:
        self._asked_at = None

    def _make_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **options: Any,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        trajectory_id = _trajectory.get()
        if trajectory_id is not None:
            self._owners[task] = trajectory_id
        return task

    def _format_stack(self) -> str:
        """What the loop's thread executes, from the first line on that is the user's."""
        frame = sys._current_frames().get(self._background.thread_id or 0)
        frames = list(traceback.extract_stack(frame)) if frame is not None else []
        first = next((n for n, f in enumerate(frames) if is_of_user(f.filename)), 0)
        return "".join(traceback.format_list(frames[first:][-_MAX_FRAMES:]))
