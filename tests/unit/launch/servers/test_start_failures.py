"""The sentences are vLLM 0.32's, taken from its source and its logs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.servers.start_failures import find_start_failure

PREFIX = "(EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:1512] "
Find = Callable[..., UserInputError | None]


@pytest.fixture
def find(make_config: Callable[..., Any]) -> Find:
    config = make_config(server_args=["--block-size", "7"])

    def find_in(log: str, *, on_cpu: bool = True) -> UserInputError | None:
        return find_start_failure(config, "vllm-0", log, "logs/vllm-0.log", on_cpu=on_cpu)

    return find_in


@pytest.mark.parametrize(
    ("sentence", "keys"),
    [
        (
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine",
            ["engine.gpu_memory_utilization", "engine.tensor_parallel_size", "model.dtype"],
        ),
        (
            "ValueError: To serve at least one request with the model's max seq len (8192), (2.0 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (1.0 GiB).",
            ["engine.max_model_len (8192)", "engine.gpu_memory_utilization (None)"],
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            ["engine.tensor_parallel_size (1)", "model.dtype (bfloat16)"],
        ),
        (
            "ValueError: Free memory on device cuda:0 (3/24 GiB) on startup is less than desired "
            "GPU memory utilization (0.9, 21.6 GiB).",
            ["engine.gpu_memory_utilization"],
        ),
        (
            "ValueError: User-specified max_model_len (8192) is greater than the derived "
            "max_model_len (max_position_embeddings=1024)",
            ["engine.max_model_len (8192)"],
        ),
        (
            "pydantic_core.ValidationError: Model architectures ['FooForCausalLM'] are not "
            "supported for now.",
            ["model.path (/"],
        ),
        (
            "safetensors_rust.SafetensorError: Error while deserializing header: incomplete "
            "metadata, file not fully covered",
            ["model.path (/"],
        ),
        (
            "api_server.py: error: argument --block-size: invalid choice: 7",
            ["engine.server_args (['--block-size', '7'])"],
        ),
    ],
)
def test_a_servers_own_sentence_is_shown_with_the_keys_that_change_it(
    find: Find, sentence: str, keys: list[str]
) -> None:
    log = f"noise\n{PREFIX}{sentence}\n{PREFIX}at the end\nRuntimeError: Engine core failed\n"
    text = str(find(log, on_cpu=False))
    assert sentence.split(": ", 1)[1][:60] in text
    assert PREFIX not in text
    assert "at the end" not in text
    assert all(key in text for key in keys)
    assert "logs/vllm-0.log" in text


def test_memory_on_cpu_has_a_key_of_its_own(find: Find) -> None:
    text = str(find("Available memory on node 0 (1/2 GiB) on kv cache allocation is less"))
    assert "engine.cpu_kv_cache_gib (1.0)" in text
    assert "gpu_memory" not in text.partition("What changes it")[2]


@pytest.mark.parametrize("log", ["", "INFO all is well\n", "RuntimeError: Engine core failed"])
def test_other_failures_are_left_to_the_reader(find: Find, log: str) -> None:
    assert find(log) is None
