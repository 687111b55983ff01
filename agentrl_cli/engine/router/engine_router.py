"""Several engine servers as one engine, whose calls survive a server that dies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import (
    EngineServer,
    Generation,
    Probe,
    Replica,
    Sampling,
    WeightTransfer,
    check_request,
    join_pieces,
)
from agentrl_cli.engine.router.served_weights import ServedWeights
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool, is_down, shorten
from agentrl_cli.engine.router.server_recovery import ServerRecovery
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, ServerDownError

if TYPE_CHECKING:
    import torch

_CLOSED = "the engine was closed"
#: Tokens to a piece where the whole completion is asked for. A piece costs about 0.1 ms here, and
#: shows how many tokens were lost with a server that died.
_STREAM_INTERVAL = 64
#: A call may find each server dead before the router knows that it is; beyond that it is sampled
#: again this often. One that kills its servers must not reach all of them again and again.
_MAX_RESAMPLINGS = 3


class EngineRouter:
    """An inference engine over servers that may die, hang, and recover.

    A session's calls go to one server, for its prefix cache; a new session to the server with
    the fewest calls. A server that fails is unhealthy from then on, and its calls are sampled
    again elsewhere, from their start. It is healthy again once it holds the current weights and
    this was verified. Calls wait while no server is healthy, until their own deadline.

    Made and used on one event loop. Takes over servers and transfer: it closes them.

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
        if not servers:
            raise ValueError("a router needs at least one server")
        self._config = config
        self._model_name = model_name
        self._pool = ServerPool(servers)
        self._weights = ServedWeights(self._pool, transfer, config)
        self._recovery = ServerRecovery(self._pool, self._weights)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shares_gpu = shares_gpu
        self._is_closed = False

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model_name

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self._config.max_model_len

    @property
    def num_unhealthy_servers(self) -> int:
        """Servers that take no calls at this moment."""
        return len(self._pool.servers) - len(self._pool.healthy)

    @property
    def num_in_flight(self) -> int:
        """Calls that are being sampled."""
        return sum(server.num_running for server in self._pool.servers)

    def take_fault_metrics(self) -> dict[str, float]:
        """What happened to calls and servers since the last time; see ServerFaultCounter."""
        counts, self._pool.counts = self._pool.counts, Counter()
        names = ("resampled_calls", "lost_tokens", "server_failures", "server_recoveries")
        metrics = {name: float(counts[name]) for name in names}
        return {**metrics, "num_unhealthy_servers": float(self.num_unhealthy_servers)}

    async def start(self, version: int | None) -> None:
        """Returns when at least one server is healthy; brings back unhealthy ones from then on.

        Args:
            version: of the weights that the servers loaded at their start; None: nothing is
                sampled before weights are published.

        Raises:
            EngineTimeoutError: no server was healthy within ``start_timeout_seconds``.
        """
        self._loop = asyncio.get_running_loop()
        limit = self._config.start_timeout_seconds
        deadline = self._loop.time() + limit
        self._weights.version = version
        await self._recovery.start()
        try:
            await self._pool.wait_until(lambda: bool(self._pool.healthy), deadline)
        except TimeoutError:
            raise EngineTimeoutError(
                f"no engine server was ready within {limit:g} s (engine.start_timeout_seconds). "
                f"{self._pool.describe_unhealthy()}"
            ) from None

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Samples one completion; see :class:`InferenceEngine`."""
        return await self.sample(prompt_ids, sampling, session_id)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str = "",
        *,
        only_on: RoutedServer | None = None,
    ) -> Generation:
        """As :meth:`generate`; with ``only_on``, by this server and no other."""
        call = self._open_call(prompt_ids, sampling, session_id, only_on=only_on)
        async with aclosing(call.stream()) as pieces:
            return await anext(pieces)

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """Samples one completion and yields its pieces as they come.

        What was yielded cannot be taken back: a server that fails after that fails the call.
        Before, the call is sampled again elsewhere.
        """
        return self._open_call(prompt_ids, sampling, session_id, yields_pieces=True).stream()

    def _open_call(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str,
        *,
        yields_pieces: bool = False,
        only_on: RoutedServer | None = None,
    ) -> RoutedCall:
        self._pool.check_alive()
        check_request(prompt_ids, sampling, self.max_model_len)
        return RoutedCall(
            self._pool,
            prompt_ids,
            sampling,
            session_id=session_id,
            timeout_seconds=self._config.generate_timeout_seconds,
            yields_pieces=yields_pieces,
            only_on=only_on,
        )

    async def policy_version(self) -> int:
        """The version that all healthy servers report; see :class:`InferenceEngine`."""
        return await self._weights.policy_version()

    @property
    def replicas(self) -> Sequence[Replica]:
        """The healthy servers, each by itself: a call fails with its server."""
        return [_RouterReplica(self, server) for server in self._pool.serving]

    async def ask_version(self, server: RoutedServer) -> int:
        """The version that ``server`` reports.

        Raises:
            ServerDownError: it is unhealthy.
        """
        version = await self._weights.ask_version(server) if server.is_healthy else None
        if version is None:
            raise server.unhealthy_error()
        return version

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
        if self._shares_gpu:
            await self._on_all(lambda server: server.sleep())

    async def reclaim_memory(self) -> None:
        """Wakes them."""
        if self._shares_gpu:
            await self._on_all(lambda server: server.wake())

    async def _on_all(self, act: Callable[[EngineServer], Awaitable[None]]) -> None:
        async def act_on(server: RoutedServer) -> None:
            incarnation = server.incarnation
            try:
                async with server.until_unhealthy(incarnation):
                    await act(server.client)
            except EngineError as error:
                if not await is_down(server, error):
                    raise
                self._pool.mark_unhealthy(server, incarnation, shorten(str(error)))

        self._pool.check_alive()
        results = await asyncio.gather(*map(act_on, self._pool.healthy), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def fail(self, error: AgentrlError) -> None:
        """Ends all calls, now and later, with ``error``. From any thread.

        Called when the supervision of the servers' processes has given them up.
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
        await self._recovery.close()
        for server in self._pool.servers:
            await server.client.close()
        await self._weights.close()


class RoutedCall:
    """One call: sampled by a server, and again from its start by another if that one fails.

    Args:
        pool: the servers.
        prompt_ids: checked.
        sampling: checked.
        session_id: calls of one session go to one server, for its prefix cache.
        timeout_seconds: for the whole call. Time frozen by a pause, or without any server,
            counts: it is what the caller is promised to wait at most.
        yields_pieces: False: the completion comes as one piece.
        only_on: the one server that may sample it; the call fails with it.
    """

    def __init__(
        self,
        pool: ServerPool,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str,
        timeout_seconds: float,
        yields_pieces: bool = False,
        only_on: RoutedServer | None = None,
    ) -> None:
        self._pool = pool
        self._prompt_ids = list(prompt_ids)
        self._sampling = sampling
        self._session_id = session_id
        self._timeout_seconds = timeout_seconds
        self._deadline = asyncio.get_running_loop().time() + timeout_seconds
        self._yields_pieces = yields_pieces
        self._only_on = only_on
        self._pieces: list[Generation] = []
        """Of the current attempt."""

    async def stream(self) -> AsyncGenerator[Generation]:
        """The pieces of the completion.

        Raises:
            EngineTimeoutError: the call's deadline passed.
            ServerDownError: a server failed, and the call cannot be sampled again.
            EngineError: a healthy server refused the call, or the engine was closed.
        """
        for num_left in reversed(range(_MAX_RESAMPLINGS + len(self._pool.servers))):
            server = await self._find_server()
            incarnation, self._pieces = server.incarnation, []
            try:
                async with aclosing(self._sample(server, incarnation)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except TimeoutError:
                raise self._timeout_error(
                    f"{self._num_tokens} tokens were sampled by {server.name}"
                ) from None
            except EngineError as error:
                if not await is_down(server, error):
                    raise
                self._pool.mark_unhealthy(server, incarnation, shorten(str(error)))
                self._lose_tokens(server, error, may_retry=num_left > 0)

    async def _sample(self, server: RoutedServer, incarnation: int) -> AsyncGenerator[Generation]:
        """One attempt.

        Raises:
            ServerDownError: the server failed, or samples with weights of another process.
            TimeoutError: the call's deadline passed.
        """
        oldest = server.version
        assert oldest is not None
        stream = server.client.stream(
            self._prompt_ids,
            self._sampling,
            stream_interval=1 if self._yields_pieces else _STREAM_INTERVAL,
        )
        server.num_running += 1
        server.num_calls += 1
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                while True:
                    async with server.until_unhealthy(incarnation, self._deadline):
                        piece = await anext(stream, None)
                    if piece is None:
                        raise ServerDownError(f"{server.name} ended its answer too early")
                    self._pieces.append(piece)
                    if piece.finish_reason is not None:
                        break
                    if self._yields_pieces:
                        yield piece
        finally:
            server.num_running -= 1
        self._check_complete(server, oldest)
        yield self._pieces[-1] if self._yields_pieces else join_pieces(self._pieces)

    def _check_complete(self, server: RoutedServer, oldest: int) -> None:
        versions = self._pieces[-1].versions
        num_logprobs = sum(len(piece.rollout_logprobs) for piece in self._pieces)
        if not self._num_tokens == num_logprobs == len(versions):
            raise EngineError(
                f"{server.name} answered with {self._num_tokens} tokens, {num_logprobs} logprobs "
                f"and {len(versions)} versions"
            )
        server.check_versions(versions, oldest)

    async def _find_server(self) -> RoutedServer:
        while True:
            self._pool.check_alive()
            server = self._only_on or self._pool.choose(self._session_id)
            if server is not None:
                if not server.is_healthy or server.version is None:
                    raise server.unhealthy_error()
                return server
            try:
                await self._pool.wait_until(lambda: bool(self._pool.serving), self._deadline)
            except TimeoutError:
                problem = f"no server could take it. {self._pool.describe_unhealthy()}"
                raise self._timeout_error(problem) from None

    def _lose_tokens(self, server: RoutedServer, error: EngineError, *, may_retry: bool) -> None:
        """Gives up what a failed server has sampled.

        Raises:
            ServerDownError: the call cannot be sampled again.
        """
        self._pool.check_alive()
        self._pool.counts["lost_tokens"] += self._num_tokens
        reason = shorten(str(error))
        if self._only_on is not None:
            raise ServerDownError(f"{server.name} is unhealthy: {reason}") from error
        if self._yields_pieces and any(p.finish_reason is None for p in self._pieces):
            raise ServerDownError(
                f"{reason}. A part of the streamed reply was handed out already, so that it "
                "cannot be sampled again"
            ) from error
        if not may_retry:
            raise ServerDownError(
                f"{reason}. The call was sampled again {_MAX_RESAMPLINGS} times and more, and each "
                "server failed under it"
            ) from error
        self._pool.counts["resampled_calls"] += 1

    @property
    def _num_tokens(self) -> int:
        return sum(len(piece.completion_ids) for piece in self._pieces)

    def _timeout_error(self, progress: str) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"the completion was not finished after {self._timeout_seconds:g} s "
            f"(engine.generate_timeout_seconds): {progress}"
        )


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
            ServerDownError: it became unhealthy; before it serves again it is verified.
        """
        return await self.router.sample(prompt_ids, sampling, session_id, only_on=self.server)

    async def policy_version(self) -> int:
        """The version that the server reports."""
        return await self.router.ask_version(self.server)
