"""What a run in one process does when its servers are given up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import cast

import pytest

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.router import EngineRouter
from agentrl_cli.engine.server import ServerEndpoint, WeightTransfer
from agentrl_cli.engine.vllm import VllmServer
from agentrl_cli.errors import AgentrlError, EngineError
from agentrl_cli.launch.fleet import closing_fleet

#: Nothing listens there.
ENDPOINT = ServerEndpoint(name="vllm-0", base_url="http://127.0.0.1:1", api_key="the-key")


class LostFleet:
    """Servers that are never there, and are given up when the test says so."""

    untied_head = False
    shares_gpu = False
    endpoints = (ENDPOINT,)

    def __init__(self) -> None:
        self.error: AgentrlError | None = None
        self.on_failed: Callable[[AgentrlError], None] | None = None

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def give_up(self) -> None:
        self.error = EngineError("vllm-0 died 4 times within an hour")
        if self.on_failed is not None:
            self.on_failed(self.error)


class NoTransfer:
    async def close(self) -> None:
        """Holds nothing."""


@pytest.mark.parametrize("given_up", ["before", "during"])
async def test_calls_fail_with_the_servers_instead_of_waiting_for_them(
    make_config: Callable[..., ExperimentConfig], given_up: str
) -> None:
    config, fleet = make_config(), LostFleet()
    engine = EngineConfig(kind="vllm", start_timeout_seconds=600.0)
    router = EngineRouter(
        [VllmServer(ENDPOINT, engine, model_name="m")],
        engine,
        model_name="m",
        transfer=cast("WeightTransfer", NoTransfer()),
    )

    async def start() -> None:
        with closing_fleet(fleet, config, 0) as starting:
            if given_up == "before":
                fleet.give_up()
            starting.end_with_servers(router)
            if given_up == "during":
                threading.Timer(0.3, fleet.give_up).start()
            async with asyncio.timeout(20.0):
                await router.start(0)

    try:
        with pytest.raises(EngineError, match="died 4 times"):
            await start()
        with pytest.raises(EngineError, match="died 4 times"):
            await router.generate([1, 2], Sampling(max_tokens=4))
    finally:
        await router.close()
