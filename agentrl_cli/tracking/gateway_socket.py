"""The gateway on a socket, for agents that open connections of their own.

A client that blocks, used in async code, stops the very event loop that has to answer it, and
with it every deadline: such connections are refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import uvicorn

from agentrl_cli.errors import InlineLimitError, RunError, UserInputError

LOOPBACK = "127.0.0.1"
#: Environment variable with the key that opens a gateway to other machines.
KEY_VARIABLE = "AGENTRL_API_KEY"
_MIN_KEY_LENGTH = 16
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 3600
_BACKLOG = 2048

#: (process, port) of each socket, and the thread whose event loop answers there.
_loop_threads: dict[tuple[int, int], int] = {}


class OwnLoopError(InlineLimitError):
    """A blocking connection of an event loop's thread to a socket of that loop."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the program that this server is a part of."""
        yield


class GatewaySocket:
    """Serves an ASGI app in the running event loop, on 127.0.0.1 unless told otherwise."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port = 0
        self._base_url = ""

    def open_socket(self, port: int = 0, host: str = LOOPBACK) -> str:
        """The base_url of a socket, opened on first use: ``http://127.0.0.1:N/v1``.

        For the event loop that is to serve it; connections wait in the kernel until that gets to
        run.

        Args:
            port: on first use, where to open it; 0: at a free port.
            host: on first use, the address; others than this machine's own let others in.

        Raises:
            UserInputError: the port or the address cannot be used.
        """
        if self._task is not None and not self._task.done():
            return self._base_url
        self._loop = asyncio.get_running_loop()
        listener = open_listener(port, host)
        listener.listen(_BACKLOG)
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            backlog=_BACKLOG,
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
        # In a context of its own: that of a trajectory, which may be the first to need the
        # server, would live as long as the server, with all that it holds.
        self._task = self._loop.create_task(
            self._server.serve(sockets=[listener]), context=contextvars.Context()
        )
        shown = f"[{host}]" if ":" in host else host
        self._port = listener.getsockname()[1]
        self._base_url = f"http://{shown}:{self._port}/v1"
        _install_hook()
        _loop_threads[os.getpid(), self._port] = threading.get_ident()
        return self._base_url

    async def serve(self, port: int = 0, host: str = LOOPBACK) -> str:
        """As :meth:`open_socket`; returns when requests are answered there.

        Raises:
            RunError: not in time.
        """
        base_url = self.open_socket(port, host)
        await self._wait_started()
        return base_url

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the socket was opened in."""
        assert self._loop is not None, "the socket is not open"
        return self._loop

    @property
    def socket_urls(self) -> tuple[str, ...]:
        """The base_url of the socket; empty: it was not opened."""
        return (self._base_url,) if self._base_url else ()

    async def _wait_started(self) -> None:
        assert self._server is not None
        assert self._task is not None
        deadline = self.loop.time() + _START_SECONDS
        while not self._server.started:
            if self._task.done() or self.loop.time() > deadline:
                raise RunError(f"the gateway did not begin to serve at {self._base_url}")
            await asyncio.sleep(0.01)

    async def close_socket(self) -> None:
        """Ends the server; connections still open are closed after a few seconds."""
        if self._server is None or self._task is None:
            return
        with contextlib.suppress(RunError):
            await self._wait_started()
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=_STOP_SECONDS)
        if not done:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._server = self._task = None
        _loop_threads.pop((os.getpid(), self._port), None)


def open_listener(port: int, host: str = LOOPBACK) -> socket.socket:
    """A socket bound to ``port`` of ``host``; 0: to one that is free.

    Raises:
        UserInputError: the port or the address cannot be used.
    """
    # With the protocol named, asyncio turns off Nagle's algorithm for its connections;
    # left to the system (0), every answer waits 40 ms for the client's acknowledgement.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Without it, connections of a server that has just ended hold its port for a minute.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserInputError(
            f"port {port} of {host} cannot be used: {error.strerror}. Type another one "
            "(--port, or rollout.external.port), or leave it out for one that is free"
        ) from None
    return listener


def check_binding(host: str, api_key: str | None, where: str) -> None:
    """Refuses to let other machines in by a key that nobody chose, or by one that can be guessed.

    Args:
        host: the address to listen at.
        api_key: the key that the user gave; None: none.
        where: what the user typed to name the address.

    Raises:
        UserInputError: with what to type.
    """
    if api_key is not None and (len(api_key) < _MIN_KEY_LENGTH or not api_key.isascii()):
        raise UserInputError(
            f"the key in {KEY_VARIABLE} (or --api-key) has {len(api_key)} characters; allowed are "
            f"{_MIN_KEY_LENGTH} or more, of ASCII. Type export {KEY_VARIABLE}=$(openssl rand -hex "
            "24)"
        )
    if api_key is None and not is_loopback(host):
        raise UserInputError(
            f"{where} {host} lets other machines in, and no key was given. Type export "
            f"{KEY_VARIABLE}=$(openssl rand -hex 24) before it, or leave out {where} to listen "
            f"on {LOOPBACK} alone"
        )


def is_loopback(host: str) -> bool:
    """True for addresses that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _install_hook() -> None:
    """Once in a process: such a hook cannot be removed."""
    sys.addaudithook(_check_connection)


def _check_connection(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "socket.connect" or not _loop_threads:
        return
    connecting, address = arguments
    # asyncio's own sockets do not block; those of Unix have a path as address.
    if connecting.gettimeout() == 0 or not isinstance(address, tuple):
        return
    if not is_loopback(address[0]):
        return
    if _loop_threads.get((os.getpid(), address[1])) == threading.get_ident():
        # The caller expects nothing but an OSError, and would leave the socket open.
        connecting.close()
        raise OwnLoopError(
            "a client that blocks was used in async code, on the event loop that has to answer it, "
            "so it would wait for ever. Await the async form (OpenAI: AsyncOpenAI, Anthropic: "
            "AsyncAnthropic, CAMEL: astep, LangChain: ainvoke), or move the call into a thread: "
            "await asyncio.to_thread(function, ...), or write the agent as a plain def, which gets "
            "a thread of its own, or set rollout.agent_mode: subprocess"
        )
