"""The servers behind the router: who is in, who takes the next call, what is known of each."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.engine.server import UNKNOWN_VERSION, EngineServer
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: Sessions whose server is remembered: far more than are ever open at the same time.
_MAX_SESSIONS = 65_536
#: Of a reason that goes into another message; a server's log lines would drown it.
_MAX_REASON_CHARS = 300


class Attempt:
    """What one server has sampled for one call, and how much of it is beyond doubt.

    A server says only at the end of a call which weights sampled each token. If it dies
    before, a token counts only if it arrived before new weights were on their way (so it
    belongs to the version that the server had when the attempt began), and if this very
    process has shown since its first piece that it held that version: a process that died
    and came back between two health checks may have served its old weights in between.
    """

    def __init__(self, server: RoutedServer, began_at: int) -> None:
        assert server.version is not None
        self.server = server
        self.began_at = began_at
        self.version = server.version
        self.epoch = server.epoch
        self.completion_ids: list[int] = []
        self.rollout_logprobs: list[float] = []
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.allowed_versions = {server.version}
        self._evidence = server.evidence
        self._first_piece_at: int | None = None
        self._sealed_at: int | None = None
        if server.next_version is not None:
            self.seal(server.next_version)

    def add(self, piece: Generation, clock: int) -> None:
        """Takes a piece; ``clock`` is the pool's, when it arrived."""
        if self._first_piece_at is None:
            self._first_piece_at = clock
        self.completion_ids.extend(piece.completion_ids)
        self.rollout_logprobs.extend(piece.rollout_logprobs)
        self.top_logprobs.extend(piece.top_logprobs)

    def seal(self, version: int) -> None:
        """From here on tokens may be of ``version``: only the server will be able to say."""
        if self._sealed_at is None:
            self._sealed_at = len(self.completion_ids)
        self.allowed_versions.add(version)

    def distrust(self, num_tokens: int) -> None:
        """Counts no token after the first ``num_tokens`` as certain."""
        self._sealed_at = num_tokens

    @property
    def is_sealed(self) -> bool:
        """Whether new weights were on their way since the attempt began."""
        return self._sealed_at is not None

    @property
    def is_confirmed(self) -> bool:
        """Whether the process that samples has shown that it holds ``version``."""
        if self._first_piece_at is None:
            return False
        return self._evidence.get(self.version, -1) > self._first_piece_at

    @property
    def num_certain(self) -> int:
        """How many tokens remain true if the server dies now.

        Not the last one that arrived: it may be an end token, or the last that was allowed,
        and the piece that would have said so is lost. It is sampled again.
        """
        if not self.is_confirmed:
            return 0
        num_tokens = len(self.completion_ids)
        sealed_at = num_tokens if self._sealed_at is None else self._sealed_at
        return max(0, min(sealed_at, num_tokens - 1))


class RoutedServer:
    """One server and what the router knows of it."""

    def __init__(self, client: EngineServer) -> None:
        self.client = client
        self.name = client.name
        self.version: int | None = None
        """The policy version that it was last given."""
        self.next_version: int | None = None
        """The policy version that it is being given at this moment."""
        self.is_in = False
        self.is_proven = False
        """Whether its weights were compared with probes since it came in."""
        self.attempts: set[Attempt] = set()
        self.num_calls = 0
        self.num_misses = 0
        self.num_mismatches = 0
        self.out_reason = "it has not answered yet"
        self.out_since = 0.0
        self.epoch = 0
        """Counts how often it went out: what belongs to an earlier epoch is over."""
        self.evidence: dict[int, int] = {}
        """For each policy version, the pool's clock when the last question began that the
        server answered with that version."""
        self._blocks: set[asyncio.Timeout] = set()

    def begin_change(self, version: int) -> None:
        """Says that from now on tokens may come from the weights of ``version``."""
        self.next_version = version
        for attempt in self.attempts:
            attempt.seal(version)

    def add_evidence(self, version: int, asked_at: int) -> None:
        """Notes that a question asked at the pool's clock ``asked_at`` was answered so."""
        self.evidence[version] = max(asked_at, self.evidence.get(version, -1))

    @asynccontextmanager
    async def until_out(self, epoch: int, deadline: float | None = None) -> AsyncIterator[None]:
        """Ends the block when the server goes out.

        Raises:
            ServerDownError: it went out, or was out already.
            TimeoutError: the deadline (of the loop's clock) passed.
        """
        if self.epoch != epoch:
            raise ServerDownError(f"{self.name} is out: {self.out_reason}")
        try:
            async with asyncio.timeout_at(deadline) as block:
                self._blocks.add(block)
                try:
                    yield
                finally:
                    self._blocks.discard(block)
        except TimeoutError:
            if self.epoch == epoch:
                raise
            raise ServerDownError(f"{self.name} is out: {self.out_reason}") from None

    def interrupt(self) -> None:
        """Ends the blocks of :meth:`until_out`, and with them the epoch."""
        self.epoch += 1
        for block in self._blocks:
            if not block.expired():
                block.reschedule(asyncio.get_running_loop().time())


class ServerPool:
    """Chooses servers for calls, and takes servers out and in."""

    def __init__(self, clients: Sequence[EngineServer]) -> None:
        self.servers = tuple(RoutedServer(client) for client in clients)
        self.num_failovers = 0
        self.num_outages = 0
        self.num_returns = 0
        self._sessions: OrderedDict[str, RoutedServer] = OrderedDict()
        self._clock = itertools.count()
        self._error: AgentrlError | None = None
        # Replaced by a fresh one whenever it is set.
        self._changed = asyncio.Event()

    def tick(self) -> int:
        """A number greater than all before: what came first has the smaller one."""
        return next(self._clock)

    @property
    def serving(self) -> list[RoutedServer]:
        """The servers that are in and have weights with a version."""
        return [s for s in self.servers if s.is_in and s.version is not None]

    def choose(self, session_id: str) -> RoutedServer | None:
        """The session's server, else the one with the fewest calls; None: none is in."""
        server = self._sessions.get(session_id) if session_id else None
        if server is None or not server.is_in or server.version is None:
            server = min(self.serving, key=lambda s: (len(s.attempts), s.num_calls), default=None)
        if server is not None and session_id:
            self._sessions[session_id] = server
            self._sessions.move_to_end(session_id)
            if len(self._sessions) > _MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return server

    async def wait_for_server(self, deadline: float, what: str) -> None:
        """Returns when a server serves.

        Raises:
            EngineTimeoutError: none did until ``deadline`` (the loop's clock); ``what`` is
                what waited.
        """
        await self.wait_until(lambda: bool(self.serving), deadline, what)

    async def wait_until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        """As :meth:`wait_for_server`, for a condition on the servers that are in."""
        try:
            async with asyncio.timeout_at(deadline):
                while self._error is None and not condition():
                    await self._changed.wait()
        except TimeoutError:
            raise EngineTimeoutError(
                f"{what}: no engine server could take it. {self.describe_out()}"
            ) from None
        self.check_alive()

    def take_in(self, server: RoutedServer) -> None:
        """Lets ``server`` have calls and publications."""
        seconds = asyncio.get_running_loop().time() - server.out_since
        first = server.epoch == 0
        server.is_in = True
        server.num_misses = server.num_mismatches = 0
        server.evidence = {}
        self._announce()
        if first:
            _log.info("engine server %s is in", server.name)
        else:
            self.num_returns += 1
            _log.warning(
                "engine server %s is in again after %.0f s, with policy version %s",
                server.name, seconds, server.version,
            )  # fmt: skip

    def take_out(self, server: RoutedServer, epoch: int, reason: str) -> None:
        """Ends the calls of ``server``, which go on elsewhere; nothing if ``epoch`` is over."""
        if not server.is_in or server.epoch != epoch:
            return
        server.is_in = server.is_proven = False
        self.num_outages += 1
        server.out_reason = reason
        server.out_since = asyncio.get_running_loop().time()
        self._announce()
        _log.warning(
            "engine server %s is out, its %d calls go on elsewhere: %s",
            server.name, len(server.attempts), reason,
        )  # fmt: skip
        server.interrupt()

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``; the first error stays."""
        if self._error is not None:
            return
        self._error = error
        self._announce()
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

    def describe_out(self) -> str:
        """Which servers are out, since when, and why."""
        now = asyncio.get_running_loop().time()
        parts = [
            f"{s.name} is out for {now - s.out_since:.0f} s ({shorten(s.out_reason)})"
            for s in self.servers
            if not s.is_in
        ]
        if not parts:
            return "Servers are there, but no weights were published to them yet"
        return "; ".join(parts)

    def _announce(self) -> None:
        """Wakes whoever waits for a server or an error."""
        self._changed.set()
        self._changed = asyncio.Event()

    def set_version(self, server: RoutedServer, version: int) -> None:
        """Notes that ``server`` holds the weights of ``version``."""
        server.version = version
        self._announce()


def shorten(text: str) -> str:
    """The first line of ``text``, not too long."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _MAX_REASON_CHARS else f"{line[: _MAX_REASON_CHARS - 3]}..."


async def is_down(server: RoutedServer, error: Exception) -> bool:
    """Whether ``error``, which a server raised, means that it cannot serve at all.

    vLLM answers 500 between the death of its engine process and its own.
    """
    if isinstance(error, ServerDownError):
        return True
    try:
        await server.client.check_health()
    except EngineError as problem:
        _log.warning(
            "%s failed (%s) and is not well: %s", server.name, shorten(str(error)), problem
        )
        return True
    return False


def describe_foreign(server: RoutedServer, versions: Iterable[int]) -> str:
    """What is wrong with a server that uses weights which nobody published to it."""
    shown = ", ".join(
        "weights without a version" if v == UNKNOWN_VERSION else f"policy version {v}"
        for v in sorted(versions)
    )
    return (
        f"{server.name} samples with {shown}, but was given version {server.version}: "
        "its process was started anew"
    )
