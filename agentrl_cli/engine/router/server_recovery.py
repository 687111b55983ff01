"""Brings unhealthy servers back, once they answer and hold the current weights.

Healthy servers are not polled here: one becomes unhealthy when a call or a publication fails on
it. Whether its process hangs is checked where it was started (by the launcher's
ServerSupervisor), which kills and restarts it; its calls fail at that moment.
"""

from __future__ import annotations

import asyncio

from agentrl_cli.engine.router.served_weights import ServedWeights
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool, is_down, shorten
from agentrl_cli.errors import (
    AgentrlError,
    EngineError,
    EngineTimeoutError,
    ServerDownError,
    WeightMismatchError,
)
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: Between two attempts to bring back an unhealthy server.
_RETRY_SECONDS = 0.5
#: A server that answers but cannot be given the weights is asked less and less often.
_MAX_RETRY_SECONDS = 10.0


class ServerRecovery:
    """One task for each server, from :meth:`start` to :meth:`close`."""

    def __init__(self, pool: ServerPool, weights: ServedWeights) -> None:
        self._pool = pool
        self._weights = weights
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when every server was asked once; those that answered are healthy.

        Raises:
            EngineError: a server answers that it cannot be used (another version, another key).
        """
        now = asyncio.get_running_loop().time()
        for server in self._pool.servers:
            server.unhealthy_since = now
        await asyncio.gather(*map(self._try_bring_back, self._pool.servers))
        self._tasks = [asyncio.create_task(self._look_after(s)) for s in self._pool.servers]

    async def close(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look_after(self, server: RoutedServer) -> None:
        retry_seconds = _RETRY_SECONDS
        try:
            while True:
                await self._pool.wait_until(
                    lambda: not server.is_healthy or self._weights.is_unverified(server)
                )
                if server.is_healthy:
                    await self._verify(server)
                else:
                    await asyncio.sleep(retry_seconds)
                    is_refusing = not await self._try_bring_back(server)
                    retry_seconds = (
                        min(2 * retry_seconds, _MAX_RETRY_SECONDS)
                        if is_refusing
                        else _RETRY_SECONDS
                    )
        except Exception as error:
            if isinstance(error, AgentrlError) and self._pool.has_failed:
                return
            # Without its task a server would never come back: the run must not continue like that.
            _log.exception("the recovery of %s failed", server.name)
            failure = EngineError(
                f"the recovery of {server.name} failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._pool.fail(failure)

    async def _verify(self, server: RoutedServer) -> None:
        """Compares a healthy server with probes that came after it recovered."""
        incarnation, version = server.incarnation, server.version
        try:
            async with server.until_unhealthy(incarnation):
                await self._weights.verify(server)
        except WeightMismatchError as error:
            # Not if new weights were on their way to it meanwhile.
            if server.version == version and server.next_version is None:
                self._pool.mark_unhealthy(server, incarnation, str(error))
        except EngineError as error:
            if await is_down(server, error):
                self._pool.mark_unhealthy(server, incarnation, shorten(str(error)))
            await asyncio.sleep(_RETRY_SECONDS)

    async def _try_bring_back(self, server: RoutedServer) -> bool:
        """Brings a server back if it answers; False: it answers, and refuses to be brought back."""
        try:
            await server.client.check_health()
        except EngineError as error:
            may_come = isinstance(error, ServerDownError | EngineTimeoutError)
            if not self._tasks and not may_come:
                raise
            if server.incarnation == 0:
                server.unhealthy_reason = str(error)
            _log.debug("%s is still unhealthy: %s", server.name, error)
            return True
        try:
            await self._weights.bring_back(server)
        except ServerDownError as error:
            _log.debug("%s is down again: %s", server.name, error)
        except WeightMismatchError as error:
            _log.error("%s", error)
            self._pool.fail(error)
        except EngineError as error:
            reason = f"it answers again, but did not take the weights: {shorten(str(error))}"
            if reason != server.unhealthy_reason:
                _log.warning("engine server %s stays unhealthy: %s", server.name, error)
            server.unhealthy_reason = reason
            return False
        return True
