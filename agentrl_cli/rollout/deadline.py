"""A deadline that holds even for code which swallows its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from agentrl_cli.log import get_logger
from agentrl_cli.tracking.blocking_client import BlockingCallError
from agentrl_cli.tracking.loop_guard import OwnLoopError

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

#: How long cancelled code may take to clean up before it is left behind.
GRACE_SECONDS = 5.0


class DeadlineError(Exception):
    """The deadline of a trajectory passed."""


async def run_with_deadline(
    coroutine: Coroutine[Any, Any, ResultT],
    seconds: float,
    what: str,
    *,
    grace: float = 0.0,
    describe_late: Callable[[], str] | None = None,
) -> ResultT:
    """The coroutine's result, or a DeadlineError when it takes longer.

    ``asyncio.timeout`` waits until the cancelled code has ended, which is never when an
    agent catches CancelledError and goes on; here such code is cancelled again and then left.
    ``grace`` are seconds after the deadline in which it may still end by itself;
    ``describe_late`` is asked afterwards what the error shall say besides.

    Raises:
        DeadlineError: the deadline passed.
    """
    task = asyncio.ensure_future(_contain_exit(coroutine, what))
    try:
        await asyncio.wait({task}, timeout=seconds + grace)
    except asyncio.CancelledError:
        await _end(task, what)
        raise
    if task.done():
        if task.cancelled():
            # Not our doing: something inside cancelled the task that it ran in.
            raise RuntimeError(f"{what} cancelled itself (asyncio.CancelledError)")
        return task.result()
    await _end(task, what)
    more = describe_late() if describe_late is not None else ""
    raise DeadlineError(f"{what} did not finish in {seconds:g} seconds{more}")


async def _contain_exit(coroutine: Coroutine[Any, Any, ResultT], what: str) -> ResultT:
    """The coroutine's result; asyncio would end the whole event loop for a ``sys.exit()``."""
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"{what} called exit({error.code!r})") from error
    except OwnLoopError as error:
        raise BlockingCallError(str(error)) from error


async def _end(task: asyncio.Task[Any], what: str) -> None:
    """Cancels a task until it has ended, for a while."""
    for _ in range(5):
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS / 5)
        if task.done():
            if not task.cancelled() and task.exception() is not None:
                _log.debug("%s raised while it was cancelled", what, exc_info=task.exception())
            return
    _log.warning("%s ignored five cancellations and was left running", what)
