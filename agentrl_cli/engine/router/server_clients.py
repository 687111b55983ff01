"""Clients of the servers of a run."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.config.resolved_run import EngineKind
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.sglang.sglang_server import SglangServer
from agentrl_cli.engine.vllm.vllm_server import VllmServer


def open_clients(
    kind: EngineKind, endpoints: Iterable[ServerEndpoint], config: EngineConfig
) -> list[EngineServer]:
    """A client for each server; it connects with its first request."""
    open_server = SglangServer if kind == "sglang" else VllmServer
    return [open_server(endpoint, config) for endpoint in endpoints]
