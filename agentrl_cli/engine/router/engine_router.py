"""Several engine servers as one engine, whose calls survive a server that dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import Probe, ServerEndpoint, WeightTransfer
from agentrl_cli.engine.router.pooled_engine import PooledEngine
from agentrl_cli.engine.router.served_weights import ServedWeights
from agentrl_cli.engine.router.server_mirror import ServerMirror
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.process_channel import Message

if TYPE_CHECKING:
    import torch


class EngineRouter(PooledEngine):
    """An inference engine over servers that may die, hang, and recover.

    A session's calls go to one server, for its prefix cache; a new session to the server with
    the fewest calls. A server that fails is unhealthy from then on, and its calls are sampled
    again elsewhere, from their start. It is healthy again once it holds the current weights and
    this was verified. Calls wait while no server is healthy, until their own deadline.

    Made and used on one event loop, which runs. Takes over servers and transfer: it closes them.

    Args:
        servers: clients of the servers; their processes are supervised elsewhere.
        config: deadlines and sizes.
        model_name: the name under which the model is served.
        transfer: how published weights reach the servers.
        shares_gpu: whether the trainer computes on a GPU of theirs.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        config: EngineConfig,
        *,
        model_name: str,
        transfer: WeightTransfer,
        shares_gpu: bool = False,
    ) -> None:
        super().__init__(ServerPool(servers, config), config, model_name)
        self._weights = ServedWeights(self._pool, transfer, config)
        self._loop = asyncio.get_running_loop()
        self._shares_gpu = shares_gpu
        self._is_closed = False

    def add_mirror(self, send: Callable[[Message], None]) -> ServerMirror:
        """Keeps a process that calls the servers too informed of them, over ``send``; its messages
        go to the mirror, and what it counts is counted here."""
        return ServerMirror(self._pool, send)

    def take_fault_metrics(self) -> dict[str, float]:
        """What happened since the last call, by the name of the metric.

        ``resampled_calls``: calls that were sampled again from their start; ``lost_tokens``:
        tokens sampled for nothing, because their server failed before the call was complete;
        ``server_failures`` and ``server_recoveries``: how often a server became unhealthy, and
        healthy again; ``num_unhealthy_servers``: at this moment.
        """
        counts, self._pool.counts = self._pool.counts, Counter()
        names = ("resampled_calls", "lost_tokens", "server_failures", "server_recoveries")
        metrics = {name: float(counts[name]) for name in names}
        num_unhealthy = len(self._pool.servers) - len(self._pool.healthy)
        return {**metrics, "num_unhealthy_servers": float(num_unhealthy)}

    @property
    def endpoints(self) -> list[ServerEndpoint]:
        """Where the servers are."""
        return [server.client.endpoint for server in self._pool.servers]

    def move(self, endpoint: ServerEndpoint) -> None:
        """Takes the server of this name to be another process, at this endpoint, from now on; it
        serves when it holds the current weights."""
        [server] = [one for one in self._pool.servers if one.name == endpoint.name]
        reason = f"it was started again, at {endpoint.base_url}"
        self._pool.mark_unhealthy(server, server.incarnation, reason)
        server.client.move(endpoint)
        self._pool.announce()

    async def start(self, version: int | None) -> None:
        """Returns when at least one server is healthy; brings back unhealthy ones from then on.

        Args:
            version: of the weights that the servers loaded at their start; None: nothing is
                sampled before weights are published.

        Raises:
            EngineTimeoutError: no server was healthy within ``start_timeout_seconds``.
        """
        limit = self._config.start_timeout_seconds
        deadline = self._loop.time() + limit
        await self._weights.start(version)
        try:
            await self._pool.wait_until(lambda: bool(self._pool.healthy), deadline)
        except TimeoutError:
            raise EngineTimeoutError(
                f"no engine server was ready within {limit:g} s (engine.start_timeout_seconds). "
                f"{self._pool.describe_unhealthy()}"
            ) from None

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Sets what a server that recovers with ``version`` must compute.

        One that holds other weights ends the run: every call from then on raises a
        WeightMismatchError.
        """
        self._weights.expect(version, probes)

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights to all healthy servers, and to the others when they recover.

        Raises:
            EngineError: a running server did not take them; or no server recovered to take
                them.
        """
        await self._weights.publish(version, weights)

    async def release_memory(self) -> None:
        """Lets servers that share the trainer's GPU sleep, once their calls have ended."""
        await self._on_shared(lambda server: server.sleep())

    async def reclaim_memory(self) -> None:
        """Wakes them."""
        await self._on_shared(lambda server: server.wake())

    async def _on_shared(self, act: Callable[[EngineServer], Awaitable[None]]) -> None:
        async def act_on(server: RoutedServer) -> None:
            with suppress(ServerDownError):
                async with server.until_unhealthy():
                    await act(server.client)

        self._pool.check_alive()
        servers = self._pool.healthy if self._shares_gpu else []
        for result in await asyncio.gather(*map(act_on, servers), return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``. From any thread.

        Called when the supervision of the servers' processes has given them up.
        """
        if not self._is_closed:
            self._loop.call_soon_threadsafe(self._pool.fail, error)

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.fail(EngineError("the engine was closed"))
        await self._weights.close()
        for server in self._pool.servers:
            await server.client.close()
