"""A small random model on vLLM servers behind the router, for the benchmarks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint, WeightTransfer, WeightUpdate
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.tokenizer_training import train_tokenizer
from benchmarks.small_model import build_model

QUESTION = {"role": "user", "content": "What is the sum of the numbers from one to ten?"}
_MAX_MODEL_LEN = 768


def build_config(model_folder: str, log_dir: str, max_num_seqs: int) -> ExperimentConfig:
    """An experiment of which only model and engine count."""
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "benchmark",
            "output_dir": log_dir,
            "model": {"path": model_folder, "dtype": "float32"},
            "agent_builder_path": "builders.none",
            "train_dataset": {"path": "none.jsonl"},
            "engine": {
                "kind": "vllm",
                "device": "cpu",
                "max_model_len": _MAX_MODEL_LEN,
                "max_num_seqs": max_num_seqs,
                "weight_transfer": {"kind": "disk"},
            },
        }
    )


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A small tokenizer with a chat template."""
    return train_tokenizer([QUESTION["content"], "The answer is fifty-five."], 512)


def save_model(folder: Path, hidden_size: int, num_layers: int) -> PreTrainedModel:
    """A random Qwen2 without an end token, saved with its tokenizer."""
    model = build_model(hidden_size, num_layers, tied=False)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return model


def build_server_group(config: ExperimentConfig, folder: Path) -> ServerGroup:
    """One server on the CPU that can be given weights."""
    return ServerGroup(
        config,
        resolve_run(config, Machine.detect(), purpose="train"),
        str(folder),
        log_dir=folder / "logs",
        observer=SilentObserver(),
    )


class TimedTransfer:
    """A transfer that notes how long the weights' way out of this process took."""

    def __init__(self, transfer: WeightTransfer) -> None:
        self._transfer = transfer
        self.prepare_seconds = 0.0

    async def prepare(self, version: int, weights: Mapping[str, Tensor]) -> WeightUpdate:
        """As the transfer's."""
        started = time.perf_counter()
        update = await self._transfer.prepare(version, weights)
        self.prepare_seconds = time.perf_counter() - started
        return update

    async def close(self) -> None:
        """Closes the transfer."""
        await self._transfer.close()


def build_transfer(config: ExperimentConfig, folder: Path) -> TimedTransfer:
    """The way through a file."""
    return TimedTransfer(
        build_weight_transfer(config, model_folder=str(folder), kind="disk", tied_names={})
    )


@asynccontextmanager
async def open_router(
    config: ExperimentConfig, transfer: WeightTransfer, endpoints: list[ServerEndpoint]
) -> AsyncIterator[EngineRouter]:
    """A router before servers that run."""
    router = EngineRouter(
        [VllmServer(endpoint, config.engine) for endpoint in endpoints],
        config.engine,
        model_name="m",
        transfer=transfer,
    )
    try:
        await router.start(0)
        yield router
    finally:
        await router.close()
