"""Servers as a process sees them that calls them, but does not decide about them.

The router of the trainer's process has the authority: which servers are healthy, what they hold,
when they are given weights. It tells other processes of every change (:class:`ServerMirror`). Those
call the servers themselves (:class:`MirrorEngine`), and report a server that fails under a call.

Incarnations make it simple: both sides count the same failure as the end of the same incarnation,
so that a call goes elsewhere without waiting for an answer, and older news never undo newer ones.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import Probe, ServerEndpoint
from agentrl_cli.engine.router.pooled_engine import PooledEngine
from agentrl_cli.engine.router.server_pool import RoutedServer, ServerPool
from agentrl_cli.errors import EngineError, build_error
from agentrl_cli.process_channel import Message

if TYPE_CHECKING:
    import torch

#: What the event loop of another process may take to read a message: one that is blocked makes no
#: calls either, and reads what was sent before it makes the next.
_CONFIRM_SECONDS = 2.0
#: What news of a version may take longer than its first token.
_NEWS_SECONDS = 5.0
#: What is counted where the calls are made.
_CALL_COUNTS = ("resampled_calls", "lost_tokens")


class ServerMirror:
    """The trainer's end: what is known of the servers, sent at every change.

    Args:
        pool: the servers.
        send: sends a message to the other process.
    """

    def __init__(self, pool: ServerPool, send: Callable[[Message], None]) -> None:
        self._pool = pool
        self._send = send
        self._sent: Message = {}
        self._number = self._num_seen = 0
        self._seen = asyncio.Event()
        self.is_stalled = False
        """Nothing is awaited of a process that is known not to answer."""
        pool.mirrors.add(self)
        self.push()

    def push(self) -> None:
        """Sends the state of all servers, if it has changed."""
        error = self._pool.error
        state = {
            "servers": [_describe(server) for server in self._pool.servers],
            "error": error and [type(error).__name__, str(error), error.exit_code],
        }
        if state != self._sent:
            self._sent = state
            self._number += 1
            self._send({"op": "servers", "number": self._number, **state})

    async def confirm(self) -> None:
        """Returns when the last state has been seen; not later than in two seconds."""
        number = self._number
        with suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRM_SECONDS):
                while self._num_seen < number and not self.is_stalled:
                    self._seen.clear()
                    await self._seen.wait()

    def receive(self, message: Message) -> None:
        """Takes what the other end has sent: ``seen``, ``unhealthy`` or ``counts``."""
        if message["op"] == "seen":
            self._num_seen = message["number"]
            self._seen.set()
        elif message["op"] == "counts":
            self._pool.counts.update({name: message[name] for name in _CALL_COUNTS})
        else:
            [server] = [one for one in self._pool.servers if one.name == message["server"]]
            # Does nothing where its incarnation is over: the other end then has news on its way.
            self._pool.mark_unhealthy(server, message["incarnation"], message["reason"])

    def close(self) -> None:
        """Ends it: the other process is gone."""
        self._pool.mirrors.discard(self)
        self.is_stalled = True
        self._seen.set()


def _describe(server: RoutedServer) -> Message:
    is_changing = server.next_version is not None
    return {
        "endpoint": asdict(server.client.endpoint),
        "is_healthy": server.is_healthy,
        "version": server.version,
        "next_version": server.next_version,
        "incarnation": server.incarnation,
        "reason": server.unhealthy_reason,
        "cache_salt": None if is_changing else server.client.cache_salt,
    }


class MirrorPool(ServerPool):
    """Servers about which another process decides; nothing is called before its first news."""

    def __init__(
        self,
        clients: Sequence[EngineServer],
        config: EngineConfig,
        report: Callable[[Message], None],
    ) -> None:
        super().__init__(clients, config)
        self._report = report

    def take_state(self, message: Mapping[str, Any]) -> None:
        """Takes the news of a :class:`ServerMirror`."""
        by_name = {server.name: server for server in self.servers}
        for told in message["servers"]:
            endpoint = ServerEndpoint(**told["endpoint"])
            server = by_name[endpoint.name]
            if told["incarnation"] < server.incarnation:
                # It failed here meanwhile, of which news are on their way.
                continue
            if server.is_healthy and not told["is_healthy"]:
                server.unhealthy_since = self.now()
            if told["incarnation"] > server.incarnation:
                server.interrupt()
                server.incarnation = told["incarnation"]
            if server.client.endpoint != endpoint:
                server.client.move(endpoint)
            server.is_healthy = told["is_healthy"]
            server.version, server.next_version = told["version"], told["next_version"]
            server.unhealthy_reason = told["reason"]
            server.client.take_cache_salt(told["cache_salt"])
        if message["error"] is not None:
            self.fail(build_error(*message["error"]))
        self.announce()
        self._report({"op": "seen", "number": message["number"]})

    def mark_unhealthy(self, server: RoutedServer, incarnation: int, reason: str) -> None:
        """Calls it no more until there are news of it, and reports why."""
        if server.is_healthy and server.incarnation == incarnation:
            report = {"server": server.name, "incarnation": incarnation, "reason": reason}
            self._report({"op": "unhealthy", **report})
        super().mark_unhealthy(server, incarnation, reason)

    async def learn_of(self, server: RoutedServer, version: int) -> None:
        """Waits shortly for news of a version that is newer than what is known here."""
        with suppress(TimeoutError):
            await self.wait_until(
                lambda: version <= (server.newest_version or 0), self.now() + _NEWS_SECONDS
            )


class MirrorEngine(PooledEngine):
    """An engine for agents on servers about which another process decides.

    Made and used on one event loop, which runs. Takes over the servers' clients.

    Args:
        servers: clients of the servers.
        config: deadlines and sizes.
        model_name: the name under which the model is served.
        report: sends a message to the :class:`ServerMirror`.
    """

    def __init__(
        self,
        servers: Sequence[EngineServer],
        config: EngineConfig,
        *,
        model_name: str,
        report: Callable[[Message], None],
    ) -> None:
        self._mirror = MirrorPool(servers, config, report)
        self._report = report
        super().__init__(self._mirror, config, model_name)

    def take_state(self, message: Message) -> None:
        """Takes the news of the :class:`ServerMirror`."""
        self._mirror.take_state(message)

    def report_counts(self) -> None:
        """Sends what has been counted since the last time, if it is anything."""
        counts, self._mirror.counts = self._mirror.counts, Counter()
        found = {name: counts[name] for name in _CALL_COUNTS}
        if any(found.values()):
            self._report({"op": "counts", **found})

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Not here. Raises EngineError."""
        self._refuse()

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Not here. Raises EngineError."""
        self._refuse()

    async def release_memory(self) -> None:
        """Not here. Raises EngineError."""
        self._refuse()

    async def reclaim_memory(self) -> None:
        """Not here. Raises EngineError."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise EngineError(
            "weights and memory of the engine are the trainer's, and this is a rollout worker, a "
            "process of its own. For a workflow that touches them, type rollout.num_workers=0"
        )

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        self._mirror.fail(EngineError("the engine was closed"))
        for server in self._mirror.servers:
            await server.client.close()
