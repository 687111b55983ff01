"""Health checks of the servers: who hangs goes out, who answers again comes back."""

from __future__ import annotations

import asyncio

from agentrl_cli.engine.router_pool import RoutedServer, ServerPool, describe_foreign, shorten
from agentrl_cli.engine.router_weights import ServedWeights
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: Between two checks of a server that is in: two requests that cost it nothing.
_CHECK_SECONDS = 1.0
#: Deadline of such a check, however patient the client is.
_CHECK_TIMEOUT_SECONDS = 10.0
#: Checks in a row that a server that is in may fail.
_MAX_MISSES = 3
#: Between two tries to bring back a server that is out.
_RETRY_SECONDS = 0.5
#: A server that answers but cannot be given the weights is asked less and less often.
_MAX_RETRY_SECONDS = 10.0


class ServerWatch:
    """One task for each server, from :meth:`start` to :meth:`close`."""

    def __init__(self, pool: ServerPool, weights: ServedWeights) -> None:
        self._pool = pool
        self._weights = weights
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every server was asked once; those that answered are in.

        Raises:
            EngineError: a server answers that it cannot be used (another version, another key).
        """
        now = asyncio.get_running_loop().time()
        for server in self._pool.servers:
            server.out_since = now
        await asyncio.gather(*(self._try_bring_in(server) for server in self._pool.servers))
        self._tasks = [asyncio.create_task(self._watch(s)) for s in self._pool.servers]

    async def close(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, server: RoutedServer) -> None:
        retry_seconds = _RETRY_SECONDS
        try:
            while not self._pool.has_failed:
                if server.is_in:
                    retry_seconds = _RETRY_SECONDS
                    await asyncio.sleep(_CHECK_SECONDS)
                    await self._check(server)
                    continue
                await asyncio.sleep(retry_seconds)
                if await self._try_bring_in(server):
                    retry_seconds = _RETRY_SECONDS
                else:
                    retry_seconds = min(2 * retry_seconds, _MAX_RETRY_SECONDS)
        except Exception as error:
            # Without its watch a server would never come back: no run goes on like that.
            _log.exception("the watch of %s failed", server.name)
            failure = EngineError(
                f"the watch of {server.name} failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._pool.fail(failure)

    async def _check(self, server: RoutedServer) -> None:
        """Asks a server that is in for its health, its version, and what is still to be proven."""
        epoch, version, asked_at = server.epoch, server.version, self._pool.tick()
        deadline = asyncio.get_running_loop().time() + _CHECK_TIMEOUT_SECONDS
        try:
            async with server.until_out(epoch, deadline):
                reported = await server.client.check_health()
            is_changing = server.next_version is not None or server.version != version
            if not is_changing and version is not None:
                server.add_evidence(reported, asked_at)
                if reported != version:
                    raise ServerDownError(describe_foreign(server, {reported}))
                if self._weights.is_unproven(server):
                    async with server.until_out(epoch):
                        await self._weights.prove(server)
        except ServerDownError as error:
            self._pool.take_out(server, epoch, shorten(str(error)))
        except WeightMismatchError as error:
            if server.version == version and server.next_version is None:
                self._pool.take_out(server, epoch, str(error))
        except (EngineError, TimeoutError) as error:
            if server.next_version is not None:
                # It is reading weights and answers nothing meanwhile; that has its own deadline.
                return
            server.num_misses += 1
            if server.num_misses >= _MAX_MISSES:
                what = shorten(str(error)) or f"no answer within {_CHECK_TIMEOUT_SECONDS:g} s"
                reason = f"{_MAX_MISSES} health checks failed: {what}"
                self._pool.take_out(server, epoch, reason)
        else:
            server.num_misses = 0

    async def _try_bring_in(self, server: RoutedServer) -> bool:
        """Brings a server in if it answers; False: it answers, and cannot be brought in."""
        try:
            await server.client.check_health()
        except EngineError as error:
            may_come = isinstance(error, ServerDownError | EngineTimeoutError)
            if not self._tasks and not may_come:
                raise
            if server.epoch == 0:
                server.out_reason = str(error)
            _log.debug("%s is still out: %s", server.name, error)
            return True
        try:
            await self._weights.bring_in(server)
        except ServerDownError as error:
            _log.debug("%s is out again: %s", server.name, error)
        except WeightMismatchError as error:
            _log.error("%s", error)
            self._pool.fail(error)
        except EngineError as error:
            reason = f"it answers again, but did not take the weights: {shorten(str(error))}"
            if reason != server.out_reason:
                _log.warning("engine server %s stays out: %s", server.name, error)
            server.out_reason = reason
            return False
        return True
