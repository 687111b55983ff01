"""Refuses connections that would wait for ever: an event loop's own thread to its own server.

A client that blocks, used in async code, stops the loop that has to answer it. No deadline could
end that: the loop keeps the deadlines too.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from typing import Any

_LOOPBACK = ("127.0.0.1", "::1")
#: (process, port) of each server, and the thread whose event loop it runs on.
_threads: dict[tuple[int, int], int] = {}


class OwnLoopError(BaseException):
    """A blocking connection of an event loop's thread to a server on that loop.

    No Exception: SDKs take those for a broken connection, and try again twice after a sleep.
    """


def guard_port(port: int) -> None:
    """Refuses blocking connections of this thread, whose loop serves ``port``, to that port."""
    _install_hook()
    _threads[os.getpid(), port] = threading.get_ident()


def release_port(port: int) -> None:
    """Ends :func:`guard_port`."""
    _threads.pop((os.getpid(), port), None)


@cache
def _install_hook() -> None:
    """Once in a process: such a hook cannot be taken away."""
    sys.addaudithook(_check)


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "socket.connect" or not _threads:
        return
    connecting, address = arguments
    # asyncio's own sockets do not block; those of Unix have a path as address.
    if connecting.gettimeout() == 0 or not isinstance(address, tuple):
        return
    if address[0] not in _LOOPBACK:
        return
    if _threads.get((os.getpid(), address[1])) == threading.get_ident():
        # Who connects does not expect anything but an OSError, and would leave it open.
        connecting.close()
        raise OwnLoopError(
            "a client that blocks was used in async code, on the event loop that has to answer it, "
            "so it would wait for ever. Await AsyncOpenAI (or AsyncAnthropic) instead, or write "
            "the agent as a plain def, which gets a thread of its own, or set "
            "rollout.agent_mode: subprocess"
        )
