"""Running code that blocks beside an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from agentrl_cli.log import get_logger

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)


async def run_in_thread(function: Callable[[], ResultT], name: str) -> ResultT:
    """What ``function`` returns, run in a thread of its own called ``name``.

    Agents wait most of the time: in a pool they would wait for each other besides. Cancelled,
    this returns at once, and the thread ends when the function does; it does not keep the
    process alive.

    Raises:
        BaseException: what the function raised.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ResultT] = loop.create_future()
    context = contextvars.copy_context()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():
            if error is not None:
                _log.debug("%s raised after nobody waited for it", name, exc_info=error)
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = context.run(function)
        except StopIteration as stop:
            # A future cannot carry it.
            error = RuntimeError(f"{name} raised StopIteration")
            error.__cause__ = stop
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(finish, result, error)
        except RuntimeError:
            _log.debug("%s ended after its event loop", name)

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future
