"""The gateway on a loopback socket, for agents that open their own connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from agentrl_cli.errors import RunError, UserInputError

_START_SECONDS = 20.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 3600


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the program that this server is a part of."""
        yield


class LoopbackServer:
    """Serves an ASGI app on 127.0.0.1 in the running event loop."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = asyncio.Lock()
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._url = ""

    async def start(self, port: int = 0) -> str:
        """The server's url, ``http://127.0.0.1:PORT``; starts it when it is not running.

        Args:
            port: where it listens if it is started now; 0: at one that is free.

        Raises:
            UserInputError: another program listens at that port.
            RunError: it was not ready in time.
        """
        async with self._lock:
            if self._task is None or self._task.done():
                await self._start(port)
            return self._url

    async def stop(self) -> None:
        """Ends the server; connections still open are closed after a few seconds."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=_STOP_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._server = self._task = None

    async def _start(self, port: int) -> None:
        listener = open_listener(port)
        config = uvicorn.Config(
            self._app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            # Nobody forwards requests to a loopback socket, and no route is a websocket.
            proxy_headers=False,
            ws="none",
            # An agent's tool may take minutes between two calls: a connection that is closed
            # meanwhile can fail the call that is just being sent on it.
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_STOP_SECONDS) - 1,
        )
        self._server = _Server(config)
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        self._url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        deadline = asyncio.get_running_loop().time() + _START_SECONDS
        while not self._server.started:
            if self._task.done() or asyncio.get_running_loop().time() > deadline:
                raise RunError(f"the gateway did not begin to serve at {self._url}")
            await asyncio.sleep(0.01)


def open_listener(port: int) -> socket.socket:
    """A socket bound to ``port`` of 127.0.0.1; 0: to one that is free.

    Raises:
        UserInputError: the port cannot be used.
    """
    # With the protocol named, asyncio turns off Nagle's algorithm for its connections;
    # left to the system (0), every answer waits 40 ms for the client's acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Without it, connections of a server that has just ended hold its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise UserInputError(
            f"port {port} of 127.0.0.1 cannot be used: {error.strerror}. Type another --port, "
            "or leave it out for one that is free"
        ) from None
    return listener
