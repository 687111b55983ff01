"""The servers behind the router: which are healthy, and which one takes the next call."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from agentrl_cli.engine.protocol import UNKNOWN_VERSION, EngineServer
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: Sessions whose server is remembered: far more than are ever open at the same time.
_MAX_SESSIONS = 65_536
#: Of a reason that goes into another message; a server's log lines would drown it.
_MAX_REASON_CHARS = 300


class RoutedServer:
    """One server and what the router knows of it."""

    def __init__(self, client: EngineServer) -> None:
        self.client = client
        self.name = client.name
        self.version: int | None = None
        """The policy version that it was last given."""
        self.next_version: int | None = None
        """The policy version that it is being given at this moment."""
        self.is_healthy = False
        self.is_verified = False
        """Whether its weights were compared with probes since it became healthy."""
        self.num_running = 0
        self.num_calls = 0
        self.num_mismatches = 0
        self.unhealthy_reason = "it has not answered yet"
        self.unhealthy_since = 0.0
        self.incarnation = 0
        """Counts how often it became unhealthy: work of an earlier incarnation is void."""
        self._blocks: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def until_unhealthy(
        self, incarnation: int, deadline: float | None = None
    ) -> AsyncIterator[None]:
        """Ends the block when the server becomes unhealthy.

        Raises:
            ServerDownError: it became unhealthy, or was already.
            TimeoutError: the deadline (of the loop's clock) passed.
        """
        if self.incarnation != incarnation:
            raise self.unhealthy_error()
        try:
            async with asyncio.timeout_at(deadline) as block:
                self._blocks.add(block)
                try:
                    yield
                finally:
                    self._blocks.discard(block)
        except TimeoutError:
            if self.incarnation == incarnation:
                raise
            raise self.unhealthy_error() from None

    def interrupt(self) -> None:
        """Ends the blocks of :meth:`until_unhealthy`, and with them the incarnation."""
        self.incarnation += 1
        for block in self._blocks:
            if not block.expired():
                block.reschedule(asyncio.get_running_loop().time())

    def unhealthy_error(self) -> ServerDownError:
        """The error of a call that only this server may answer."""
        return ServerDownError(f"{self.name} is unhealthy: {self.unhealthy_reason}")

    def check_versions(self, versions: Iterable[int], oldest: int) -> None:
        """Compares what a call was sampled with, which began with ``oldest``, with what was given.

        Raises:
            ServerDownError: its process was restarted without the router noticing.
        """
        newest = self.version if self.next_version is None else self.next_version
        assert newest is not None
        foreign = {version for version in versions if not oldest <= version <= newest}
        if foreign:
            shown = ", ".join(
                "weights without a version" if v == UNKNOWN_VERSION else f"policy version {v}"
                for v in sorted(foreign)
            )
            raise ServerDownError(
                f"{self.name} samples with {shown}, but was given version {self.version}: "
                "its process was restarted"
            )


class ServerPool:
    """Chooses servers for calls, and keeps track of which are healthy.

    Attributes:
        counts: what happened to servers and calls, by the name of the metric.
    """

    def __init__(self, clients: Sequence[EngineServer]) -> None:
        self.servers = tuple(RoutedServer(client) for client in clients)
        self.counts: Counter[str] = Counter()
        self._sessions: OrderedDict[str, RoutedServer] = OrderedDict()
        self._error: AgentrlError | None = None
        self._changed = asyncio.Event()

    @property
    def healthy(self) -> list[RoutedServer]:
        """The servers that answer and hold the weights they should."""
        return [server for server in self.servers if server.is_healthy]

    @property
    def serving(self) -> list[RoutedServer]:
        """The healthy servers whose weights have a version."""
        return [server for server in self.healthy if server.version is not None]

    def choose(self, session_id: str) -> RoutedServer | None:
        """The session's server, else the one with the fewest calls; None: none is serving."""
        server = self._sessions.get(session_id) if session_id else None
        if server is None or not server.is_healthy or server.version is None:
            server = min(self.serving, key=lambda s: (s.num_running, s.num_calls), default=None)
        if server is not None and session_id:
            self._sessions[session_id] = server
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return server

    async def wait_for_server(self, deadline: float, what: str) -> None:
        """Returns when a server is serving.

        Raises:
            EngineTimeoutError: none was until ``deadline`` (the loop's clock); ``what`` is
                what waited.
        """
        try:
            await self.wait_until(lambda: bool(self.serving), deadline)
        except TimeoutError:
            raise EngineTimeoutError(
                f"{what}: no engine server could take it. {self.describe_unhealthy()}"
            ) from None

    async def wait_until(
        self, condition: Callable[[], bool], deadline: float | None = None
    ) -> None:
        """Returns when a condition on the servers holds.

        Raises:
            TimeoutError: it did not until ``deadline`` (the loop's clock).
        """
        async with asyncio.timeout_at(deadline):
            while self._error is None and not condition():
                await self._changed.wait()
        self.check_alive()

    def mark_healthy(self, server: RoutedServer) -> None:
        """Lets ``server`` have calls and publications."""
        server.is_healthy = True
        server.num_mismatches = 0
        self.announce()
        if server.incarnation == 0:
            _log.info("engine server %s is healthy", server.name)
            return
        self.counts["server_recoveries"] += 1
        _log.warning(
            "engine server %s is healthy again after %.0f s, with policy version %s",
            *(server.name, self._now() - server.unhealthy_since, server.version),
        )

    def mark_unhealthy(self, server: RoutedServer, incarnation: int, reason: str) -> None:
        """Ends the calls of ``server``; does nothing if ``incarnation`` is over."""
        if not server.is_healthy or server.incarnation != incarnation:
            return
        server.is_healthy = server.is_verified = False
        self.counts["server_failures"] += 1
        server.unhealthy_reason = reason
        server.unhealthy_since = self._now()
        self.announce()
        _log.warning(
            "engine server %s is unhealthy (%d more calls were running on it): %s",
            *(server.name, server.num_running, reason),
        )
        server.interrupt()

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``; the first error stays."""
        if self._error is not None:
            return
        self._error = error
        self.announce()
        for server in self.servers:
            server.interrupt()

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`fail` was called."""
        return self._error is not None

    def check_alive(self) -> None:
        """Raises the error that ended all calls, if there is one."""
        if self._error is not None:
            # A fresh error each time: a traceback grows with every raise of the same one.
            raise type(self._error)(*self._error.args) from self._error.__cause__

    def describe_unhealthy(self) -> str:
        """Which servers are unhealthy, since when, and why."""
        parts = [
            f"{s.name} has been unhealthy for {self._now() - s.unhealthy_since:.0f} s "
            f"({shorten(s.unhealthy_reason)})"
            for s in self.servers
            if not s.is_healthy
        ]
        if not parts:
            return "Servers are healthy, but no weights were published to them yet"
        return "; ".join(parts)

    def announce(self) -> None:
        """Lets everything that waits for a change look again."""
        # Wakes everything that is waiting now; later waiters wait for the next change.
        self._changed.set()
        self._changed.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def shorten(text: str) -> str:
    """The first line of ``text``, not too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[: _MAX_REASON_CHARS - 3]}..."


async def is_down(server: RoutedServer, error: Exception) -> bool:
    """Whether ``error``, which a server raised, means that it cannot serve at all.

    vLLM answers 500 between the death of its engine process and its own; a process that was
    restarted does not know the adapter that a call asks for.
    """
    if isinstance(error, ServerDownError):
        return True
    try:
        version = await server.client.check_health()
    except EngineError as problem:
        _log.warning("%s failed (%s): %s", server.name, shorten(str(error)), problem)
        return True
    return version == UNKNOWN_VERSION and server.version is not None
