"""The weights that the servers must hold: given to them, and verified before they serve again.

Healthy servers are not polled here: one becomes unhealthy when a call or a publication fails on
it. Whether its process hangs is checked where it was started (by the launcher's
ServerSupervisor), which kills and restarts it; its calls fail at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Literal

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.probes import PROBE_SAMPLING, compare_with_probes
from agentrl_cli.engine.protocol import (
    Generation,
    Probe,
    WeightTransfer,
    WeightUpdate,
    join_pieces,
)
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool, shorten
from agentrl_cli.errors import (
    AgentrlError,
    EngineError,
    EngineTimeoutError,
    ServerDownError,
    WeightMismatchError,
)
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

#: Between two attempts to bring back an unhealthy server.
_RETRY_SECONDS = 0.5
#: A server that answers but does not take the weights, which may be large, is given them less and
#: less often.
_MAX_RETRY_SECONDS = 10.0


class ServedWeights:
    """The current weights, their version, and what a server that holds them must compute.

    Each server takes its own path through pause, update, version and resume, all at the same
    time: none is frozen for longer than its own update takes. That servers differ for a
    moment does no harm, as every token carries its version. From :meth:`start` to :meth:`close`
    a task for each server brings it back when it is unhealthy.
    """

    def __init__(self, pool: ServerPool, transfer: WeightTransfer, config: EngineConfig) -> None:
        self._pool = pool
        self._transfer = transfer
        self._config = config
        # Of all restarts: until they are used up, a server may come back.
        self._wait_seconds = (1 + config.max_restarts) * (
            config.publish_timeout_seconds + config.start_timeout_seconds
        )
        # Held while servers are given weights, so that none gets older ones after newer.
        self._lock = asyncio.Lock()
        self._update: WeightUpdate | None = None
        self._probes: tuple[int, Sequence[Probe]] | None = None
        self._version: int | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, version: int | None) -> None:
        """Returns when every server was asked once; those that answered are healthy.

        Args:
            version: of the weights that the servers loaded at their start; None: unknown.

        Raises:
            EngineError: a server answers that it cannot be used (another key).
        """
        self._version = version
        await asyncio.gather(*map(self._try_bring_back, self._pool.servers))
        self._tasks = [asyncio.create_task(self._look_after(s)) for s in self._pool.servers]

    async def close(self) -> None:
        """Ends the tasks, and drops what the transfer holds."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transfer.close()

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Keeps what servers must compute that recover with ``version``."""
        self._probes = (version, tuple(probes))
        self._pool.announce()

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights to all healthy servers; returns when at least one serves them.

        Raises:
            EngineError: a running server refused them (it is unhealthy then), or none has become
                healthy again in all the time that its restarts may take.
        """
        async with self._lock:
            self._pool.check_alive()
            update = await self._transfer.prepare(version, weights)
            # No await until the servers are chosen: one that recovers later sees the update.
            # Probes of other weights say nothing of these, whose version may be the same.
            self._update, self._version, self._probes = update, version, None
            results = await asyncio.gather(
                *map(self._update_serving, self._pool.healthy), return_exceptions=True
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        try:
            deadline = self._pool.now() + self._wait_seconds
            await self._pool.wait_until(lambda: bool(self._pool.serving), deadline)
        except TimeoutError:
            raise EngineTimeoutError(
                f"policy version {version} was published and has been waiting for "
                f"{self._wait_seconds:g} s (engine.publish_timeout_seconds + "
                "engine.start_timeout_seconds, for each start that engine.max_restarts allows): no "
                "engine server could take it. "
                f"{self._pool.describe_unhealthy()}"
            ) from None

    async def _update_serving(self, server: RoutedServer) -> None:
        """Gives the current weights to a healthy server; that it dies, or is slow, is no failure:
        it is given them again when it is brought back."""
        incarnation = server.incarnation
        try:
            async with server.until_unhealthy():
                await self._give(server)
        except ServerDownError:
            return
        except BaseException as error:
            # Frozen, perhaps with half of the weights: it must not serve as it is.
            reason = f"it did not take the weights: {shorten(str(error)) or type(error).__name__}"
            self._pool.mark_unhealthy(server, incarnation, reason)
            if not isinstance(error, EngineTimeoutError):
                raise

    async def _give(self, server: RoutedServer) -> None:
        """Pause, update, version, resume.

        Raises:
            EngineError: naming the leg.
        """
        version = self._version
        assert version is not None
        server.next_version = version
        self._pool.announce()
        try:
            if server.is_healthy:
                # Calls of other processes, too, share no cache from here on.
                await self._pool.confirm()
            await server.client.pause()
            if self._update is not None:
                await self._update.apply(server.client)
            await server.client.set_policy_version(version)
            await server.client.resume()
            server.version = version
        except EngineError as error:
            problem = f"policy version {version} did not reach {server.name}: {error}"
            raise type(error)(problem) from error
        finally:
            server.next_version = None
            self._pool.announce()

    async def _look_after(self, server: RoutedServer) -> None:
        retry_seconds = _RETRY_SECONDS
        try:
            while True:
                await self._pool.wait_until(
                    lambda: not server.is_healthy or self._is_unverified(server)
                )
                if server.is_healthy:
                    await self._verify_late(server)
                else:
                    await asyncio.sleep(retry_seconds)
                    is_refusing = await self._try_bring_back(server) == "refused"
                    longer = min(2 * retry_seconds, _MAX_RETRY_SECONDS)
                    retry_seconds = longer if is_refusing else _RETRY_SECONDS
        except AgentrlError as error:
            self._pool.fail(error)
        except Exception as error:
            # Without its task a server would never come back: the run must not continue like that.
            _log.exception("the recovery of %s failed", server.name)
            failure = EngineError(
                f"the recovery of {server.name} failed: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self._pool.fail(failure)

    async def _try_bring_back(
        self, server: RoutedServer
    ) -> Literal["healthy", "silent", "refused"]:
        """Lets a server serve again if it answers, and takes and holds the current weights."""
        try:
            await server.client.check_health()
        except EngineError as error:
            may_come = isinstance(error, ServerDownError | EngineTimeoutError)
            if not self._tasks and not may_come:
                raise
            if server.incarnation == 0:
                server.unhealthy_reason = str(error)
            return "silent"
        try:
            await self._bring_back(server)
        except ServerDownError as error:
            _log.debug("%s is down again: %s", server.name, error)
            return "silent"
        except EngineError as error:
            reason = f"it answers again, but did not take the weights: {shorten(str(error))}"
            if reason != server.unhealthy_reason:
                _log.warning("engine server %s stays unhealthy: %s", server.name, error)
            server.unhealthy_reason = reason
            return "refused"
        return "healthy"

    async def _bring_back(self, server: RoutedServer) -> None:
        """Gives the current weights to an unhealthy server, verifies them, and lets it serve.

        Raises:
            EngineError: it did not take them, or is down (again).
            WeightMismatchError: it holds other weights, again.
        """
        has_mismatched = False
        while True:
            update, version = self._update, self._version
            if version is not None:
                async with self._lock:
                    # A publication may have ended while this waited.
                    update, version = self._update, self._version
                    await self._give(server)
                try:
                    await self._verify(server)
                except WeightMismatchError as error:
                    # Other weights, perhaps of the same version, were published meanwhile.
                    if update is not self._update:
                        continue
                    # Its process may have been restarted in between: once.
                    if has_mismatched:
                        raise
                    has_mismatched = True
                    _log.warning("%s; it is given them once more", error)
                    continue
            # No await from here on: a publication finds the server either healthy, or not yet,
            # and then it is seen here.
            if update is self._update and version == self._version:
                self._pool.mark_healthy(server)
                return

    def _is_unverified(self, server: RoutedServer) -> bool:
        """Whether probes of the server's version came only after it recovered."""
        return (
            not server.is_verified
            and server.next_version is None
            and self._probes is not None
            and self._probes[0] == server.version
        )

    async def _verify_late(self, server: RoutedServer) -> None:
        """Compares a healthy server with probes that came after it recovered."""
        incarnation, update = server.incarnation, self._update
        try:
            async with server.until_unhealthy():
                await self._verify(server)
        except WeightMismatchError as error:
            # Not if other weights, perhaps of the same version, were published meanwhile.
            if update is self._update:
                self._pool.mark_unhealthy(server, incarnation, str(error))
        except EngineError:
            await asyncio.sleep(_RETRY_SECONDS)

    async def _verify(self, server: RoutedServer) -> None:
        """Compares what the server reports and computes with what its version must.

        Raises:
            WeightMismatchError: it does not hold the weights that it was given.
        """
        version = server.version
        reported = await server.client.policy_version()
        if reported != version:
            raise WeightMismatchError(
                f"{server.name} was given policy version {version}, but reports {reported}"
            )
        if self._probes is None or self._probes[0] != version:
            return
        probes = self._probes[1]
        asked = (self._ask(server, probe.prompt_ids) for probe in probes)
        gap = compare_with_probes(await asyncio.gather(*asked), probes)
        # Not "gap > tolerance": a NaN must not pass.
        if not gap.mean <= probes[0].tolerance:
            raise WeightMismatchError(
                f"{server.name} recovered and was given policy version {version}, but does not "
                f"hold the trainer's weights. {gap.describe(probes[0].tolerance)}"
            )
        server.is_verified = True

    async def _ask(self, server: RoutedServer, prompt_ids: Sequence[int]) -> Generation:
        """What the server, which serves no calls, says of the next token."""
        seconds = self._config.generate_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                pieces = server.client.stream(prompt_ids, PROBE_SAMPLING)
                async with aclosing(pieces):
                    return join_pieces([piece async for piece in pieces])
        except TimeoutError:
            raise EngineTimeoutError(
                f"{server.name} did not answer a probe within {seconds:g} s "
                "(engine.generate_timeout_seconds)"
            ) from None
