"""Several engine servers as one engine that survives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.engine.protocol import Generation, Probe, Replica, Sampling
from agentrl_cli.engine.request_check import check_request
from agentrl_cli.engine.router_calls import RoutedCall
from agentrl_cli.engine.router_pool import RoutedServer, ServerPool, is_down, shorten
from agentrl_cli.engine.router_watch import ServerWatch
from agentrl_cli.engine.router_weights import ServedWeights
from agentrl_cli.engine.server import EngineServer, WeightTransfer
from agentrl_cli.errors import AgentrlError, EngineError, ServerDownError

if TYPE_CHECKING:
    import torch

_CLOSED = "the engine was closed"


class EngineRouter:
    """An inference engine over servers that may die, hang, and come back.

    A session's calls go to one server, for its prefix cache; a new session to the server with
    the fewest calls. A server that fails is taken out at once, and its calls go on elsewhere
    from the tokens that are beyond doubt. It is taken in again once it holds the current
    weights and has shown so. Calls wait while no server is in, until their own deadline.

    Made and used on one event loop. Takes over servers and transfer: it closes them.

    Args:
        servers: clients of the servers; their processes are looked after by somebody else.
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
        if not servers:
            raise ValueError("a router needs at least one server")
        self._config = config
        self._model_name = model_name
        self._pool = ServerPool(servers)
        self._weights = ServedWeights(self._pool, transfer, config)
        self._watch = ServerWatch(self._pool, self._weights)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shares_gpu = shares_gpu
        self._is_closed = False

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model_name

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._config.max_model_len

    @property
    def num_failovers(self) -> int:
        """How often a call was moved to another server, or sampled anew on the same."""
        return self._pool.num_failovers

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """What happened to calls and servers since the start; see :class:`ServerFaultCounter`."""
        return {
            "failovers": self._pool.num_failovers,
            "server_outages": self._pool.num_outages,
            "server_returns": self._pool.num_returns,
        }

    @property
    def num_servers_out(self) -> int:
        """Servers that are out at this moment."""
        return sum(not server.is_in for server in self._pool.servers)

    @property
    def num_in_flight(self) -> int:
        """Calls that are being sampled."""
        return sum(len(server.attempts) for server in self._pool.servers)

    async def start(self, version: int | None) -> None:
        """Begins to watch the servers; returns when at least one is in.

        Args:
            version: of the weights that the servers loaded at their start; None: nothing is
                sampled before weights are published.

        Raises:
            EngineTimeoutError: no server was healthy within ``start_timeout_seconds``.
        """
        self._loop = asyncio.get_running_loop()
        deadline = self._loop.time() + self._config.start_timeout_seconds
        self._weights.version = version
        await self._watch.start()
        await self._pool.wait_until(
            lambda: any(server.is_in for server in self._pool.servers),
            deadline,
            f"the start has been waiting for {self._config.start_timeout_seconds:g} s "
            "(engine.start_timeout_seconds)",
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Samples one completion; see :class:`InferenceEngine`."""
        return await self._generate(prompt_ids, sampling, session_id, only_on=None)

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str,
        only_on: RoutedServer | None,
    ) -> Generation:
        call = self._open_call(prompt_ids, sampling, session_id, only_on=only_on)
        try:
            return await call.next_piece()
        finally:
            await call.aclose()

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """Samples one completion; pieces come as soon as no fault can take them back.

        That is one token late, and after a publication not before the completion's end, as
        the servers say only then which weights sampled what.
        """
        return self._stream(self._open_call(prompt_ids, sampling, session_id, reading_along=True))

    async def _stream(self, call: RoutedCall) -> AsyncIterator[Generation]:
        try:
            while True:
                piece = await call.next_piece()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            await call.aclose()

    def _open_call(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str,
        *,
        reading_along: bool = False,
        only_on: RoutedServer | None = None,
    ) -> RoutedCall:
        self._pool.check_alive()
        check_request(prompt_ids, sampling, self.max_model_len)
        return RoutedCall(
            self._pool,
            prompt_ids,
            sampling,
            session_id=session_id,
            max_model_len=self.max_model_len,
            timeout_seconds=self._config.generate_timeout_seconds,
            reading_along=reading_along,
            only_on=only_on,
        )

    async def policy_version(self) -> int:
        """The version that all servers report which are in; see :class:`InferenceEngine`."""
        return await self._weights.policy_version()

    @property
    def replicas(self) -> Sequence[Replica]:
        """The servers that are in, each by itself: a call fails with its server."""
        return [_RouterReplica(self, server) for server in self._pool.serving]

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Says what a server that comes back with ``version`` must compute.

        One that holds other weights ends the run: every call from then on raises a
        WeightMismatchError.
        """
        self._weights.expect(version, probes)

    @property
    def previous_weights(self) -> Path | None:
        """Where the version before the last published one lies; None: not kept."""
        return self._weights.previous_folder

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights to all servers that are in, and to those that come back later.

        Raises:
            EngineError: a server that lives did not take them; or no server came back to
                take them.
        """
        await self._weights.publish(version, weights)

    async def pause(self) -> None:
        """Freezes the calls of all servers that are in; none comes in until :meth:`resume`."""
        self._weights.is_paused = True
        await self._on_all(lambda server: server.pause())

    async def resume(self) -> None:
        """Lets calls go on."""
        self._weights.is_paused = False
        await self._on_all(lambda server: server.resume())

    async def release_memory(self) -> None:
        """Lets servers that share the trainer's GPU sleep, once their calls have ended."""
        if self._shares_gpu:
            await self._on_all(lambda server: server.sleep())

    async def reclaim_memory(self) -> None:
        """Wakes them."""
        if self._shares_gpu:
            await self._on_all(lambda server: server.wake())

    async def _on_all(self, act: Callable[[EngineServer], Awaitable[None]]) -> None:
        async def act_on(server: RoutedServer) -> None:
            epoch = server.epoch
            try:
                async with server.until_out(epoch):
                    await act(server.client)
            except EngineError as error:
                if not await is_down(server, error):
                    raise
                self._pool.take_out(server, epoch, shorten(str(error)))

        self._pool.check_alive()
        servers = [server for server in self._pool.servers if server.is_in]
        results = await asyncio.gather(*map(act_on, servers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``. From any thread.

        For who looks after the servers' processes and has given them up.
        """
        if self._loop is None:
            self._pool.fail(error)
        elif not self._is_closed:
            self._loop.call_soon_threadsafe(self._pool.fail, error)

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.fail(EngineError(_CLOSED))
        await self._watch.close()
        for server in self._pool.servers:
            await server.client.close()
        await self._weights.close()


@dataclass(frozen=True, slots=True)
class _RouterReplica:
    """One server of the router, by which its weights can be verified."""

    router: EngineRouter
    server: RoutedServer

    @property
    def name(self) -> str:
        """Such as ``vllm-0``."""
        return self.server.name

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """As :meth:`EngineRouter.generate`, by this server and no other.

        Raises:
            ServerDownError: it went out; before it comes in again it is verified.
        """
        return await self.router._generate(prompt_ids, sampling, session_id, self.server)

    async def policy_version(self) -> int:
        """The version that the server reports."""
        if not self.server.is_in:
            raise ServerDownError(f"{self.name} is out: {self.server.out_reason}")
        return await self.server.client.policy_version()
