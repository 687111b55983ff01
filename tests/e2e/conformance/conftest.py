"""The engines that every protocol is held to: a tiny random model, in process and on real vLLM."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agentrl_cli.config.experiment import EngineConfig, ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.servers.server_group import ServerGroup, open_router
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

#: vLLM's attention on CPU knows no heads narrower than 32.
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
MAX_MODEL_LEN = 2000


@pytest.fixture
def check_sampled(check_tensors: Callable[..., None]) -> Callable[[TrackingClient, Any], None]:
    """Compares a client's record and tensors with what the engine sampled."""

    def check(client: TrackingClient, engine: Any) -> None:
        recorded = [
            (tuple(i.prompt_ids), tuple(i.completion_ids), tuple(i.rollout_logprobs))
            for i in client.interactions
            if i.status is InteractionStatus.COMPLETED
        ]
        sampled = [
            (s.prompt_ids, s.generation.completion_ids, s.generation.rollout_logprobs)
            for s in engine.sampled
        ]
        assert sorted(recorded) == sorted(sampled)
        check_tensors([client], engine)

    return check


VLLM_MARKS = (
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="needs vLLM: make vllm, or the extra cpu or vllm",
    ),
)


@pytest.fixture(scope="session")
def tiny_model(chat_tokenizer: Any, build_qwen2: Callable[..., Any]) -> Any:
    """A random Qwen2 whose output head is its own."""
    return build_qwen2(chat_tokenizer, tied=False, **SHAPE)


@pytest.fixture(scope="session")
def vllm_config(
    tiny_model: Any, chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> ExperimentConfig:
    """An experiment with the tiny model, in a folder, on vLLM."""
    folder = tmp_path_factory.mktemp("conformance")
    tiny_model.save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "conformance",
            "model": {"path": str(folder), "dtype": "float32"},
            "agent_builder_path": "some.module.build",
            "train_dataset": {"path": "rows.jsonl"},
            "engine": {
                "kind": "vllm",
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 16,
                "num_threads": 1,
                "cpu_kv_cache_gib": 0.25,
                "start_timeout_seconds": 300.0,
                "generate_timeout_seconds": 120.0,
            },
        }
    )


@pytest.fixture(scope="session")
def vllm_servers(
    vllm_config: ExperimentConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServers]:
    """One real vLLM server, for the whole session."""
    machine = Machine.detect({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    run = resolve_run(vllm_config, machine, purpose="train")
    server_group = ServerGroup(
        vllm_config,
        run,
        vllm_config.model.path,
        log_dir=tmp_path_factory.mktemp("conformance-logs"),
        observer=SilentObserver(),
    )
    with server_group:
        server_group.wait()
        yield RunningServers(run=run, endpoints=tuple(server_group.endpoints))


@pytest.fixture(params=["embedded", pytest.param("vllm", marks=VLLM_MARKS)])
async def engine(
    request: pytest.FixtureRequest, tiny_model: Any, chat_tokenizer: Any, recording_engine: Any
) -> AsyncIterator[Any]:
    """Each engine in turn."""
    inner: Any
    if request.param == "vllm":
        config = request.getfixturevalue("vllm_config")
        servers = request.getfixturevalue("vllm_servers")
        transfer = build_weight_transfer(
            config,
            model_folder=config.model.path,
            kind=servers.run.weight_transfer,
            tied_names={},
        )
        inner = await open_router(config, servers, transfer, 0)
    else:
        settings = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=8, num_threads=1)
        inner = EmbeddedEngine(tiny_model, chat_tokenizer, settings, model_name="tiny")
    try:
        yield recording_engine(inner)
    finally:
        await inner.close()


@pytest.fixture
async def open_client(
    engine: Any, chat_tokenizer: Any
) -> AsyncIterator[Callable[..., TrackingClient]]:
    """Opens clients with sessions of their own on the engine: ``open_client(seed=1)``."""
    gateway = Gateway(engine, chat_tokenizer)

    def open_one(**sampling: Any) -> TrackingClient:
        session = gateway.open_session(sampling=Sampling(**sampling))
        return TrackingClient(gateway=gateway, session=session)

    yield open_one
    await gateway.close()
