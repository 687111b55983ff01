"""The engine of a run whose servers are processes of their own: a router over clients of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.router import EngineRouter
from agentrl_cli.engine.server import EngineServer, ServerEndpoint
from agentrl_cli.engine.sglang import SglangServer
from agentrl_cli.engine.vllm import VllmServer
from agentrl_cli.engine.weight_transfer import build_weight_transfer
from agentrl_cli.launch.handover import RunningServers


async def open_router(
    config: ExperimentConfig,
    model_folder: str,
    servers: RunningServers,
    version: int | None,
    tied_names: Mapping[str, str],
    on_message: Callable[[str], None] | None = None,
) -> EngineRouter:
    """A router whose servers, one of them at least, are ready for calls.

    Args:
        config: the experiment's.
        model_folder: folder or hub id that the servers loaded.
        servers: where they listen.
        version: what their weights are called; None: the first publication will say.
        tied_names: further name of a tensor -> the name under which it is published.
        on_message: gets what a person should know, a line each.

    Raises:
        EngineError: none became ready in time.
    """
    router = EngineRouter(
        [_open_server(config, servers, endpoint) for endpoint in servers.endpoints],
        config.engine,
        model_name=config.model.path,
        transfer=build_weight_transfer(
            config,
            model_folder=model_folder,
            tied_names=tied_names if servers.untied_head else {},
            num_gpus=servers.num_gpus,
            on_message=on_message,
        ),
        shares_gpu=servers.shares_gpu,
    )
    try:
        await router.start(version)
    except BaseException:
        await router.close()
        raise
    return router


def _open_server(
    config: ExperimentConfig, servers: RunningServers, endpoint: ServerEndpoint
) -> EngineServer:
    if servers.kind == "sglang":
        return SglangServer(endpoint, config.engine, model_name=config.model.path)
    return VllmServer(endpoint, config.engine, model_name=config.model.path)
