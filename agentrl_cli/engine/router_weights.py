"""The weights that the servers must hold: given to them, and proven before they serve again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.engine.protocol import Probe
from agentrl_cli.engine.router_pool import (
    RoutedServer,
    ServerPool,
    describe_foreign,
    is_down,
    shorten,
)
from agentrl_cli.engine.server import UNKNOWN_VERSION, WeightTransfer, WeightUpdate
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

#: A server that comes back with other weights than it was given gets them once more: its
#: process may have been started anew in between. Then the run stops.
_MAX_MISMATCHES = 2


class ServedWeights:
    """The current weights, their version, and what a server that holds them must show.

    Each server goes its own way through pause, update, version and resume, all at the same
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
        self.is_paused = False

    @property
    def previous_folder(self) -> Path | None:
        """See :class:`WeightTransfer`."""
        return self._transfer.previous_folder

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Keeps what servers must show that come back with ``version``."""
        self._probes = (version, tuple(probes))

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Gives weights to all servers that are in; returns when at least one serves them.

        Raises:
            EngineError: a server that lives did not take them (it is out then), or none is in.
        """
        async with self._lock:
            self._pool.check_alive()
            update = await self._transfer.prepare(version, weights)
            # No await until the servers are chosen: one that comes in later sees the update.
            self._update, self.version = update, version
            results = await asyncio.gather(
                *(self._update_serving(s) for s in self._pool.servers if s.is_in),
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
        """Gives the current weights to a server that is in; its death is no failure."""
        epoch = server.epoch
        try:
            async with server.until_out(epoch):
                await self._give(server)
        except ServerDownError as error:
            self._pool.take_out(server, epoch, shorten(str(error)))
        except BaseException as error:
            # Frozen, perhaps with half of the weights: it must not serve as it is.
            reason = f"it did not take the weights: {shorten(str(error)) or type(error).__name__}"
            died = isinstance(error, EngineError) and await is_down(server, error)
            self._pool.take_out(server, epoch, reason)
            if not died:
                raise

    async def _give(self, server: RoutedServer) -> None:
        """Pause, update, version, resume.

        Raises:
            EngineError: naming the leg.
        """
        version, leg = self.version, "pause"
        assert version is not None
        server.begin_change(version)
        try:
            await server.client.pause()
            if self._update is not None:
                leg = "weight update"
                await self._update.apply(server.client)
            leg = "version update"
            await server.client.set_policy_version(version)
            if not self.is_paused:
                leg = "resume"
                await server.client.resume()
            self._pool.set_version(server, version)
        except ServerDownError:
            raise
        except EngineError as error:
            kind = EngineTimeoutError if isinstance(error, EngineTimeoutError) else EngineError
            raise kind(
                f"policy version {version} did not reach {server.name}, {leg} failed: {error}"
            ) from error
        finally:
            server.next_version = None

    async def bring_in(self, server: RoutedServer) -> None:
        """Gives the current weights to a server that is out, proves them, and takes it in.

        Raises:
            EngineError: it did not take them, or is down (again).
            WeightMismatchError: it holds other weights, again.
        """
        while not self.is_paused:
            update, version = self._update, self.version
            if version is not None:
                async with self._lock:
                    # A publication may have gone before while this waited.
                    update, version = self._update, self.version
                    await self._give(server)
                server.is_proven = False
                try:
                    await self.prove(server)
                except WeightMismatchError as error:
                    self._count_mismatch(server, error)
                    continue
            # No await from here on: a publication finds the server either in, or not yet,
            # and then it is seen here.
            is_current = update is self._update and version == self.version
            if is_current and not self.is_paused:
                self._pool.take_in(server)
                return

    async def prove(self, server: RoutedServer) -> None:
        """Compares what the server says and computes with what was expected of its version.

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
        server.is_proven = True

    def is_unproven(self, server: RoutedServer) -> bool:
        """Whether probes of the server's version came only after it was taken in."""
        return (
            not server.is_proven and self._probes is not None and self._probes[0] == server.version
        )

    def _count_mismatch(self, server: RoutedServer, error: WeightMismatchError) -> None:
        server.num_mismatches += 1
        if server.num_mismatches >= _MAX_MISMATCHES:
            raise error
        _log.warning("%s; it is given them once more", error)

    async def policy_version(self) -> int:
        """The version that all servers report which are in.

        Raises:
            WeightMismatchError: they do not agree.
            EngineTimeoutError: none is in.
        """
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
        while True:
            await self._pool.wait_for_server(deadline, "the question for the policy version")
            async with self._lock:
                serving = self._pool.serving
                reported = await asyncio.gather(*(self._ask_version(s) for s in serving))
            known = [(s, v) for s, v in zip(serving, reported, strict=True) if v is not None]
            for server, version in known[1:]:
                if version != known[0][1]:
                    raise WeightMismatchError(
                        f"{known[0][0].name} reports policy version {known[0][1]} and "
                        f"{server.name} reports {version}: the servers hold different weights. "
                        "The run cannot go on; start it again to resume"
                    )
            if known:
                return known[0][1]

    async def _ask_version(self, server: RoutedServer) -> int | None:
        """What a server that is in reports; None: it is out now."""
        epoch = server.epoch
        try:
            async with server.until_out(epoch):
                version = await server.client.policy_version()
        except EngineError as error:
            slow = isinstance(error, EngineTimeoutError)
            if not slow and not await is_down(server, error):
                raise
            self._pool.take_out(server, epoch, shorten(str(error)))
            return None
        if version == UNKNOWN_VERSION:
            self._pool.take_out(server, epoch, describe_foreign(server, {version}))
            return None
        return version

    async def close(self) -> None:
        """Drops what the transfer holds."""
        await self._transfer.close()


def _compare(name: str, version: int, index: int, probe: Probe, logprobs: Sequence[float]) -> None:
    pairs = list(zip(logprobs, probe.logprobs, strict=True))
    for place, (engine, trainer) in enumerate(pairs):
        # Not "gap > tolerance": a NaN must not pass.
        if not abs(engine - trainer) <= probe.tolerance:
            raise WeightMismatchError(
                f"{name} came back and was given policy version {version}, but does not hold the "
                f"trainer's weights. Probe {index}, completion token {place} (id "
                f"{probe.token_ids[probe.num_prompt_tokens + place]}): engine logprob "
                f"{engine:.6f}, trainer {trainer:.6f}, apart by {abs(engine - trainer):.2e}; "
                f"allowed {probe.tolerance:.2e}"
            )
