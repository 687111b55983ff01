"""The servers behind the router: which are healthy, and which one takes the next call."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Protocol

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import UNKNOWN_VERSION, Generation, Sampling, join_pieces
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: Sessions whose server is remembered: far more than are ever open at the same time.
_MAX_SESSIONS = 65_536
#: Of a reason that goes into another message; a server's log lines would drown it.
_MAX_REASON_CHARS = 300
#: Tokens to a piece where the whole completion is asked for. A piece costs about 0.1 ms here, and
#: shows how many tokens were lost with a server that died.
_STREAM_INTERVAL = 64


class RoutedServer:
    """One server and what the router knows of it; a replica, whose calls fail with it."""

    def __init__(self, client: EngineServer, pool: ServerPool) -> None:
        self.client = client
        self.name = client.name
        self._pool = pool
        self.version: int | None = None
        """The policy version that it was last given."""
        self.next_version: int | None = None
        """The policy version that it is being given at this moment."""
        self.is_healthy = False
        self.is_verified = False
        """Whether its weights were compared with probes since it became healthy."""
        self.num_running = 0
        self.num_calls = 0
        self.unhealthy_reason = "it has not answered yet"
        self.unhealthy_since = pool.now()
        self.incarnation = 0
        """Counts how often it became unhealthy: work of an earlier incarnation is void."""
        self._blocks: set[asyncio.Timeout] = set()

    @property
    def is_serving(self) -> bool:
        """Whether it is healthy and its weights have a version."""
        return self.is_healthy and self.version is not None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        deadline: float | None = None,
    ) -> Generation:
        """As :meth:`EngineRouter.generate`, by this server and no other.

        Raises:
            ServerDownError: it became unhealthy; before it serves again it is verified.
        """
        pieces = self.sample(prompt_ids, sampling, deadline or self._pool.find_call_deadline())
        async with aclosing(pieces):
            return join_pieces([piece async for piece in pieces])

    async def policy_version(self) -> int:
        """The version that the server reports.

        Raises:
            ServerDownError: it is unhealthy, or was restarted without the router noticing.
        """
        async with self.until_unhealthy():
            try:
                version = await self.client.policy_version()
            except EngineTimeoutError as error:
                # It hung, if only for a while: it is verified before it serves again.
                raise ServerDownError(str(error)) from error
            if version == UNKNOWN_VERSION:
                self._check_versions([version], 0)
            return version

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        deadline: float,
        stream_interval: int = _STREAM_INTERVAL,
    ) -> AsyncGenerator[Generation]:
        """The pieces of one attempt at a completion.

        Raises:
            ServerDownError: the server failed, or samples with weights of another process.
            EngineTimeoutError: the deadline (of the loop's clock) passed.
        """
        incarnation, oldest, num_tokens = self.incarnation, self.version, 0
        stream = self.client.stream(prompt_ids, sampling, stream_interval=stream_interval)
        self.num_running += 1
        self.num_calls += 1
        try:
            async with aclosing(stream):
                is_over = False
                while not is_over:
                    async with self.until_unhealthy(deadline, incarnation):
                        piece = await anext(stream)
                        num_tokens += len(piece.completion_ids)
                        is_over = piece.finish_reason is not None
                        if is_over:
                            await self._pool.learn_of(self, max(piece.versions, default=0))
                            self._check_versions(piece.versions, oldest)
                    yield piece
        except ServerDownError:
            self._pool.counts["lost_tokens"] += num_tokens
            raise
        except TimeoutError:
            problem = f"{num_tokens} tokens were sampled by {self.name}"
            raise self._pool.call_timeout_error(problem) from None
        finally:
            self.num_running -= 1

    @asynccontextmanager
    async def until_unhealthy(
        self, deadline: float | None = None, incarnation: int | None = None
    ) -> AsyncIterator[None]:
        """Ends the block when the server becomes unhealthy, be it by an error of the block.

        Raises:
            ServerDownError: it became unhealthy, or is no longer of that incarnation.
            TimeoutError: the deadline (of the loop's clock) passed.
        """
        current = self.incarnation
        if not self.is_healthy or incarnation not in (None, current):
            raise self._unhealthy_error()
        try:
            async with asyncio.timeout_at(deadline) as block:
                self._blocks.add(block)
                try:
                    yield
                finally:
                    self._blocks.discard(block)
        except TimeoutError:
            if self.incarnation == current:
                raise
            raise self._unhealthy_error() from None
        except EngineError as error:
            if not await self._is_down(error):
                raise
            self._pool.mark_unhealthy(self, current, shorten(str(error)))
            raise self._unhealthy_error() from error

    @property
    def newest_version(self) -> int | None:
        """The newest policy version that it may sample with."""
        return self.version if self.next_version is None else self.next_version

    def interrupt(self) -> None:
        """Ends the blocks of :meth:`until_unhealthy`, and with them the incarnation."""
        self.incarnation += 1
        for block in self._blocks:
            if not block.expired():
                block.reschedule(self._pool.now())

    def _unhealthy_error(self) -> ServerDownError:
        self._pool.check_alive()
        return ServerDownError(f"{self.name} is unhealthy: {self.unhealthy_reason}")

    async def _is_down(self, error: EngineError) -> bool:
        """Whether ``error``, which the server raised, means that it cannot serve at all.

        vLLM answers 500 between the death of its engine process and its own; a process that was
        restarted does not know the adapter that a call asks for.
        """
        if isinstance(error, ServerDownError):
            return True
        try:
            version = await self.client.check_health()
        except EngineError as problem:
            _log.warning("%s failed (%s): %s", self.name, shorten(str(error)), problem)
            return True
        return version == UNKNOWN_VERSION and self.version is not None

    def _check_versions(self, versions: Iterable[int], oldest: int | None) -> None:
        """Compares what a call was sampled with, which began with ``oldest``, with what was given.

        Raises:
            ServerDownError: its process was restarted without the router noticing.
        """
        newest = self.newest_version
        assert oldest is not None
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


class Mirror(Protocol):
    """Keeps another process informed of the servers."""

    def push(self) -> None:
        """Sends what is known of them, if it has changed."""

    async def confirm(self) -> None:
        """Returns when the other process has taken in what was sent, or does not answer."""


class ServerPool:
    """Chooses servers for calls, and keeps track of which are healthy.

    Attributes:
        counts: what happened to servers and calls, by the name of the metric.
    """

    def __init__(self, clients: Sequence[EngineServer], config: EngineConfig) -> None:
        self._config = config
        self.servers = tuple(RoutedServer(client, self) for client in clients)
        self.counts: Counter[str] = Counter()
        self._sessions: dict[str, RoutedServer] = {}
        self.mirrors: set[Mirror] = set()
        """Those that keep other processes informed."""
        self._error: AgentrlError | None = None
        self._changed = asyncio.Event()

    @property
    def error(self) -> AgentrlError | None:
        """What ended all calls."""
        return self._error

    @property
    def healthy(self) -> list[RoutedServer]:
        """The servers that answer and hold the weights they should."""
        return [server for server in self.servers if server.is_healthy]

    @property
    def serving(self) -> list[RoutedServer]:
        """The healthy servers whose weights have a version."""
        return [server for server in self.servers if server.is_serving]

    async def choose(self, session_id: str, deadline: float) -> RoutedServer:
        """The session's server, else the one with the fewest calls; waits while none is serving.

        Raises:
            EngineTimeoutError: the call's deadline passed.
        """
        self.check_alive()
        try:
            await self.wait_until(lambda: bool(self.serving), deadline)
        except TimeoutError:
            problem = f"no server could take it. {self.describe_unhealthy()}"
            raise self.call_timeout_error(problem) from None
        server = self._sessions.pop(session_id, None)
        if server is None or not server.is_serving:
            server = min(self.serving, key=lambda one: (one.num_running, one.num_calls))
        if session_id:
            # As the newest one.
            self._sessions[session_id] = server
            if len(self._sessions) > _MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]
        return server

    def find_call_deadline(self) -> float:
        """When a call that begins now must be over. Time frozen by a pause, or without any
        server, counts: it is what the caller is promised to wait at most."""
        return self.now() + self._config.generate_timeout_seconds

    def call_timeout_error(self, progress: str) -> EngineTimeoutError:
        """The error of a call whose deadline passed."""
        return EngineTimeoutError(
            f"the completion was not finished after {self._config.generate_timeout_seconds:g} s "
            f"(engine.generate_timeout_seconds): {progress}"
        )

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
        self.announce()
        if server.incarnation == 0:
            _log.info("engine server %s is healthy", server.name)
            return
        self.counts["server_recoveries"] += 1
        _log.warning(
            "engine server %s is healthy again after %.0f s, with policy version %s",
            server.name,
            self.now() - server.unhealthy_since,
            server.version,
        )

    def mark_unhealthy(self, server: RoutedServer, incarnation: int, reason: str) -> None:
        """Ends the calls of ``server``; does nothing if ``incarnation`` is over."""
        if not server.is_healthy or server.incarnation != incarnation:
            return
        server.is_healthy = server.is_verified = False
        self.counts["server_failures"] += 1
        server.unhealthy_reason = reason
        server.unhealthy_since = self.now()
        _log.warning(
            "engine server %s is unhealthy (%d calls were running on it): %s",
            server.name,
            server.num_running,
            reason,
        )
        server.interrupt()
        self.announce()

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``; the first error stays."""
        if self._error is not None:
            return
        self._error = error
        for server in self.servers:
            server.interrupt()
        self.announce()

    def check_alive(self) -> None:
        """Raises the error that ended all calls, if there is one."""
        if self._error is not None:
            # A fresh error each time: a traceback grows with every raise of the same one.
            raise type(self._error)(*self._error.args) from self._error.__cause__

    def describe_unhealthy(self) -> str:
        """Which servers are unhealthy, since when, and why."""
        parts = [
            f"{s.name} has been unhealthy for {self.now() - s.unhealthy_since:.0f} s "
            f"({shorten(s.unhealthy_reason)})"
            for s in self.servers
            if not s.is_healthy
        ]
        return "; ".join(parts) or "Servers are healthy, but no weights were published to them yet"

    def announce(self) -> None:
        """Lets everything that waits for a change look again."""
        # Wakes everything that is waiting now; later waiters wait for the next change.
        self._changed.set()
        self._changed.clear()
        for mirror in self.mirrors:
            mirror.push()

    async def confirm(self) -> None:
        """Returns when other processes know what was announced, or do not answer."""
        await asyncio.gather(*(mirror.confirm() for mirror in self.mirrors))

    async def learn_of(self, server: RoutedServer, version: int) -> None:
        """Returns when all is known here of a server that has sampled with ``version``: at once,
        save where another process decides."""

    @staticmethod
    def now() -> float:
        """The loop's clock."""
        return asyncio.get_running_loop().time()


def shorten(text: str) -> str:
    """The first line of ``text``, not too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[: _MAX_REASON_CHARS - 3]}..."
