"""The weights that the servers must hold: given to them, and verified before they serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import UNKNOWN_VERSION, Probe, WeightTransfer, WeightUpdate
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool, is_down, shorten
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

#: A server that recovers with other weights than it was given gets them once more: its
#: process may have been restarted in between. Then the run stops.
_MAX_MISMATCHES = 2


class ServedWeights:
    """The current weights, their version, and what a server that holds them must compute.

    Each server takes its own path through pause, update, version and resume, all at the same
    time: none is frozen for longer than its own update takes. That servers differ for a
    moment does no harm, as every token carries its version.
    """

    def __init__(self, pool: ServerPool, transfer: WeightTransfer, config: EngineConfig) -> None:
        self._pool = pool
        self._transfer = transfer
        self._wait_seconds = config.publish_timeout_seconds + config.start_timeout_seconds
        # Held while servers are given weights, so that none gets older ones after newer.
        self._lock = asyncio.Lock()
        self._update: WeightUpdate | None = None
        self._probes: tuple[int, Sequence[Probe]] | None = None
        self.version: int | None = None

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Keeps what servers must compute that recover with ``version``."""
        self._probes = (version, tuple(probes))
        self._pool.announce()

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights to all healthy servers; returns when at least one serves them.

        Raises:
            EngineError: a running server did not take them (it is unhealthy then), or none is
                healthy.
        """
        async with self._lock:
            self._pool.check_alive()
            update = await self._transfer.prepare(version, weights)
            # No await until the servers are chosen: one that recovers later sees the update.
            self._update, self.version = update, version
            results = await asyncio.gather(
                *(self._update_serving(server) for server in self._pool.healthy),
                return_exceptions=True,
            )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self._pool.wait_for_server(
            asyncio.get_running_loop().time() + self._wait_seconds,
            f"policy version {version} was published and has been waiting for "
            f"{self._wait_seconds:g} s (engine.publish_timeout_seconds + "
            "engine.start_timeout_seconds)",
        )

    async def _update_serving(self, server: RoutedServer) -> None:
        """Gives the current weights to a healthy server; its death is no failure."""
        incarnation = server.incarnation
        try:
            async with server.until_unhealthy(incarnation):
                await self._give(server)
        except ServerDownError as error:
            self._pool.mark_unhealthy(server, incarnation, shorten(str(error)))
        except BaseException as error:
            # Frozen, perhaps with half of the weights: it must not serve as it is.
            reason = f"it did not take the weights: {shorten(str(error)) or type(error).__name__}"
            died = isinstance(error, EngineError) and await is_down(server, error)
            self._pool.mark_unhealthy(server, incarnation, reason)
            if not died:
                raise

    async def _give(self, server: RoutedServer) -> None:
        """Pause, update, version, resume.

        Raises:
            EngineError: naming the leg.
        """
        version, leg = self.version, "pause"
        assert version is not None
        server.next_version = version
        try:
            await server.client.pause()
            if self._update is not None:
                leg = "weight update"
                await self._update.apply(server.client)
            leg = "version update"
            await server.client.set_policy_version(version)
            leg = "resume"
            await server.client.resume()
            server.version = version
            self._pool.announce()
        except ServerDownError:
            raise
        except EngineError as error:
            kind = EngineTimeoutError if isinstance(error, EngineTimeoutError) else EngineError
            raise kind(
                f"policy version {version} did not reach {server.name}, {leg} failed: {error}"
            ) from error
        finally:
            server.next_version = None

    async def bring_back(self, server: RoutedServer) -> None:
        """Gives the current weights to an unhealthy server, verifies them, and lets it serve.

        Raises:
            EngineError: it did not take them, or is down (again).
            WeightMismatchError: it holds other weights, again.
        """
        while True:
            update, version = self._update, self.version
            if version is not None:
                async with self._lock:
                    # A publication may have ended while this waited.
                    update, version = self._update, self.version
                    await self._give(server)
                server.is_verified = False
                try:
                    await self.verify(server)
                except WeightMismatchError as error:
                    server.num_mismatches += 1
                    if server.num_mismatches >= _MAX_MISMATCHES:
                        raise
                    _log.warning("%s; it is given them once more", error)
                    continue
            # No await from here on: a publication finds the server either healthy, or not yet,
            # and then it is seen here.
            if update is self._update and version == self.version:
                self._pool.mark_healthy(server)
                return

    async def verify(self, server: RoutedServer) -> None:
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
        for index, probe in enumerate(self._probes[1]):
            logprobs = await server.client.score(probe.token_ids, probe.num_prompt_tokens)
            _compare(server.name, version, index, probe, logprobs)
        server.is_verified = True

    def is_unverified(self, server: RoutedServer) -> bool:
        """Whether probes of the server's version came only after it recovered."""
        return (
            not server.is_verified
            and server.next_version is None
            and self._probes is not None
            and self._probes[0] == server.version
        )

    async def policy_version(self) -> int:
        """The version that all healthy servers report.

        Raises:
            WeightMismatchError: they do not agree.
            EngineTimeoutError: none is healthy.
        """
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        while True:
            await self._pool.wait_for_server(deadline, "the question for the policy version")
            async with self._lock:
                serving = self._pool.serving
                reported = await asyncio.gather(*map(self.ask_version, serving))
            known = [(s, v) for s, v in zip(serving, reported, strict=True) if v is not None]
            for server, version in known[1:]:
                if version != known[0][1]:
                    raise WeightMismatchError(
                        f"{known[0][0].name} reports policy version {known[0][1]} and "
                        f"{server.name} reports {version}: the servers hold different weights. "
                        "The run cannot continue; start it again to resume"
                    )
            if known:
                return known[0][1]

    async def ask_version(self, server: RoutedServer) -> int | None:
        """What a server reports; None: it is unhealthy now."""
        incarnation = server.incarnation
        try:
            async with server.until_unhealthy(incarnation):
                version = await server.client.policy_version()
            if version != UNKNOWN_VERSION:
                return version
            server.check_versions([version], 0)
        except EngineError as error:
            slow = isinstance(error, EngineTimeoutError)
            if not slow and not await is_down(server, error):
                raise
            self._pool.mark_unhealthy(server, incarnation, shorten(str(error)))
        return None

    async def close(self) -> None:
        """Drops what the transfer holds."""
        await self._transfer.close()


def _compare(name: str, version: int, index: int, probe: Probe, logprobs: Sequence[float]) -> None:
    pairs = list(zip(logprobs, probe.logprobs, strict=True))
    for place, (engine, trainer) in enumerate(pairs):
        # Not "gap > tolerance": a NaN must not pass.
        if not abs(engine - trainer) <= probe.tolerance:
            raise WeightMismatchError(
                f"{name} recovered and was given policy version {version}, but does not hold the "
                f"trainer's weights. Probe {index}, completion token {place} (id "
                f"{probe.token_ids[probe.num_prompt_tokens + place]}): engine logprob "
                f"{engine:.6f}, trainer {trainer:.6f}, apart by {abs(engine - trainer):.2e}; "
                f"allowed {probe.tolerance:.2e}"
            )
