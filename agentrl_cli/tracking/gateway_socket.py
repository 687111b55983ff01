"""The gateway on a socket, for agents that open connections of their own.

Whoever reaches the socket without a key is a stranger, and may cost next to nothing: connections,
their headers, their time and what they send are bounded before anything is kept in memory.

A client that blocks, used in async code, stops the very event loop that has to answer it, and
with it every deadline: such connections are refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import ipaddress
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl_cli.errors import InlineLimitError, RunError, UserInputError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
#: Environment variable with the key that opens a gateway to other machines.
KEY_VARIABLE = "AGENTRL_API_KEY"
_MIN_KEY_LENGTH = 16
_START_SECONDS = 20.0
_STOP_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 3600
_BACKLOG = 2048
#: Of the header of a request: as many bytes as Node's and h11's servers take, and as many lines as
#: Apache's.
_MAX_HEADER_BYTES = 16 * 2**10
_MAX_HEADER_LINES = 100
_HEADER_PIECE_BYTES = 2**10
#: How much of a request without a key is read and thrown away, so that its sender, whose key may
#: be mistyped, gets to read the refusal.
_MAX_STRANGER_BYTES = 2**20
_STRANGER_SECONDS = 10.0
#: Strangers at once. When there are more, the oldest make room; but a client on a busy machine has
#: this long to send what it connected for, and this many turns of the event loop, each of which may
#: last a second under a flood.
_MAX_STRANGERS = 512
_GRACE_SECONDS = 1.0
_GRACE_TURNS = 16
#: What a process needs open at least, besides four files for each agent: its connections to the
#: gateway and to the engine, and what its tools open.
_BASE_FILES = 256
_FILES_PER_AGENT = 4
#: More would slow down programs that close every possible file at their start.
_ENOUGH_FILES = 65_536
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: (process, port) of each socket, and the thread whose event loop answers there.
_loop_threads: dict[tuple[int, int], int] = {}


class OwnLoopError(InlineLimitError):
    """A blocking connection of an event loop's thread to a socket of that loop."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the program that this server is a part of."""
        yield


class _Strangers:
    """The connections on which no key was shown yet, the oldest first."""

    def __init__(self) -> None:
        self._since: dict[_Connection, int] = {}
        """What the count of ticks was when each came."""
        self._num_ticks = 0
        self._ticking: asyncio.TimerHandle | None = None

    def add(self, connection: _Connection) -> None:
        """Counts a new connection; makes room for it in a moment."""
        self._since[connection] = self._num_ticks
        if len(self._since) > _MAX_STRANGERS and self._ticking is None:
            self._wait(connection.loop)

    def remove(self, connection: _Connection) -> None:
        """Forgets one that has shown a key, or has ended."""
        self._since.pop(connection, None)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._ticking = loop.call_later(_GRACE_SECONDS / _GRACE_TURNS, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_ticks += 1
        self._ticking = None
        surplus = list(self._since.items())[: max(0, len(self._since) - _MAX_STRANGERS)]
        latest = self._num_ticks - _GRACE_TURNS
        for connection, since in surplus:
            if since <= latest:
                connection.transport.abort()
        if any(since > latest for _, since in surplus):
            self._wait(loop)


class _Connection(HttpToolsProtocol):
    """A connection, which is a stranger's until a request on it shows a key.

    A stranger gets one answer, which is a refusal.
    """

    def __init__(self, *args: Any, gateway: GatewaySocket, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gateway = gateway
        self._deadline: asyncio.TimerHandle | None = None
        self._is_known = self._was_refused = False
        self._num_bytes = 0
        """Since the header of a request began; of a stranger, since the connection did."""
        self._in_header = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_STRANGER_SECONDS, transport.abort)
        self._gateway.strangers.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_strangeness()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            # A socket gives 256 KiB at once: 20 ms of parsing, if they are lines of a header.
            piece = data[:_HEADER_PIECE_BYTES] if self._in_header else data
            data = data[len(piece) :]
            self._num_bytes += len(piece)
            if not self._is_known and self._num_bytes > _MAX_STRANGER_BYTES:
                self.transport.abort()
                return
            super().data_received(piece)
            num_lines = len(self.headers or ())
            is_long = self._num_bytes > _MAX_HEADER_BYTES or num_lines > _MAX_HEADER_LINES
            if self._in_header and is_long and not self.transport.is_closing():
                self.transport.write(_HEADER_REFUSAL)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header = True
        self._num_bytes = self._num_bytes if not self._is_known else 0

    def on_headers_complete(self) -> None:
        self._in_header = False
        if not self._is_known:
            if self._was_refused:
                raise PermissionError("a stranger's second request")
            self._is_known = self._gateway.knows(Headers(raw=self.headers))
            self._was_refused = not self._is_known
            if self._is_known:
                self._end_strangeness()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._was_refused and not self._is_known:
            # Only now: a close before all was read would take the refusal back.
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.transport.close()

    def _end_strangeness(self) -> None:
        self._gateway.strangers.remove(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


_HEADER_PROBLEM = (
    f"the header of a request may have {_MAX_HEADER_BYTES} bytes in {_MAX_HEADER_LINES} lines"
)
_HEADER_REFUSAL = (
    "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\n"
    f"content-length: {len(_HEADER_PROBLEM)}\r\nconnection: close\r\n\r\n{_HEADER_PROBLEM}"
).encode()


class _Listener(socket.socket):
    """A listening socket that turns a connection away when no further file can be opened.

    asyncio tries again for every connection that waits, thousands of times a second, and logs
    each attempt. A spare file makes room for taking the connection and closing it: SDKs try again.
    """

    __slots__ = ("_has_warned", "_spare")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)
        self._has_warned = False

    def accept(self) -> tuple[socket.socket, Any]:
        try:
            accepted = super().accept()
        except OSError as error:
            if error.errno not in _OUT_OF_FILES:
                raise
            self._turn_away(error)
            # To asyncio: nothing waits any more; it asks again when the socket is ready.
            raise BlockingIOError from None
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY)
        return accepted

    def _turn_away(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a connection to the gateway was turned away: %s (this process may open %d). "
                "Type ulimit -n %d before the command, or run fewer agents at a time "
                "(rollout.max_concurrent). This is said once",
                error.strerror, resource.getrlimit(resource.RLIMIT_NOFILE)[0], _ENOUGH_FILES,
            )  # fmt: skip
        if self._spare is None:
            return
        os.close(self._spare)
        self._spare = None
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            os.close(spare)
        super().close()


def raise_file_limit(num_agents: int) -> None:
    """Lets this process, and those that it starts, open as many files as the system grants.

    Says so where these are too few for ``num_agents`` at a time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _BASE_FILES + _FILES_PER_AGENT * num_agents
    if wanted < needed:
        _log.warning(
            "this process may open %d files, and %d agents at a time may need %d: connections may "
            "be turned away. Type ulimit -n %d (as root: ulimit -Hn %d) before the command, or "
            "rollout.max_concurrent=%d",
            wanted, num_agents, needed, needed, needed,
            max(1, (wanted - _BASE_FILES) // _FILES_PER_AGENT),
        )  # fmt: skip


class GatewaySocket:
    """Serves an ASGI app in the running event loop, on 127.0.0.1 unless told otherwise.

    Args:
        app: the ASGI app.
        knows: whether the headers of a request show a key that opens anything there.
    """

    def __init__(self, app: Any, knows: Callable[[Mapping[str, str]], bool]) -> None:
        self.knows = knows
        self.strangers = _Strangers()
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
            http=partial(_Connection, gateway=self),  # type: ignore[arg-type]
            backlog=_BACKLOG,
            # Its warnings are of what strangers send, as often as they like.
            log_level="error",
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
    listener = _Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
