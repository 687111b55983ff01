"""The command lines of engine servers, with the environment that they need."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import agentrl_cli.engine
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.request_check import MAX_TOP_LOGPROBS
from agentrl_cli.engine.sglang_command import build_sglang_command
from agentrl_cli.launch.devices import resolve_gpu_memory_utilization

#: Holds what a vLLM server imports of ours; standard library only.
VLLM_PLUGIN_FOLDER = Path(agentrl_cli.engine.__file__).with_name("vllm_plugin")
_KEY_GUARD = "agentrl_vllm_guard.KeyGuard"

#: Calls in flight when a server is asked to end get this long.
DRAIN_SECONDS = 5
#: vLLM allocates adapters by these ranks only.
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: While a new adapter is loaded, calls of the one before are still in flight.
_NUM_LORAS = 2
_GIB = 1024**3
_NO_KEY = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What one server is started with, besides the configuration."""

    index: int
    model_folder: str
    """Folder or hub id."""
    port: int
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them; none: it computes on the CPU."""
    shares_gpu: bool
    """True: the trainer computes on the same GPU."""
    untied_head: bool
    """True: it starts with dummy weights and an output head of its own."""
    num_threads: int
    """CPU threads, where it computes on the CPU."""
    use_nccl: bool
    """True: weights come from GPU to GPU."""
    python_path: str
    """PYTHONPATH otherwise."""
    key_path: str
    """File that an SGLang server reads its key from."""


Command = tuple[tuple[str, ...], Mapping[str, str]]


def build_vllm_command(config: ExperimentConfig, spec: ServerSpec) -> Command:
    """argv and environment of a vLLM server; its key is not among them."""
    engine = config.engine
    argv = [
        *(resolve_python(config), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", spec.model_folder, "--served-model-name", config.model.path),
        *(("--tokenizer", config.tokenizer_path) if config.tokenizer_path else ()),
        *("--dtype", config.model.dtype, "--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs)),
        *("--host", "127.0.0.1", "--port", str(spec.port)),
        # Token ids in, token ids out.
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"),
        # One more than the likeliest tokens that a call may ask for: see format_generate.
        *("--max-logprobs", str(MAX_TOP_LOGPROBS + 1)),
        # Else vLLM would take another grammar library for what it finds wrong, and the trainer,
        # which makes the same masks, would make others.
        *("--structured-outputs-config", '{"backend": "xgrammar"}'),
        # Else the model's own file would change what a request leaves out, such as top_k.
        *("--generation-config", "vllm"),
        # Servers of one seed would sample the same completions for a group's members.
        *("--seed", str((config.seed * 1009 + spec.index) % 2**31)),
        *("--middleware", _KEY_GUARD, "--disable-uvicorn-access-log"),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        *(_vllm_device_flags(config, spec)),
        *(_vllm_weight_flags(config, spec)),
        *engine.server_args,
    ]
    env = _common_env(config, spec) | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(VLLM_PLUGIN_FOLDER), spec.python_path))),
        # Opens the endpoints that take new weights.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.model.lora is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not spec.gpus:
        env |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # With the uni executor: two processes instead of three, and a start that is
            # shorter by a third.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return tuple(argv), env


def _vllm_device_flags(config: ExperimentConfig, spec: ServerSpec) -> tuple[str, ...]:
    engine = config.engine
    if not spec.gpus:
        num_bytes = int(engine.cpu_kv_cache_gib * _GIB)
        return (
            *("--enforce-eager", "--distributed-executor-backend", "uni"),
            # vLLM 0.32 on CPU dies of a request with a seed whose prompt it takes in pieces
            # ("CPU Generator does not use offset").
            "--no-enable-chunked-prefill",
            *("--kv-cache-memory-bytes", str(num_bytes)),
        )
    share = resolve_gpu_memory_utilization(engine, is_shared=spec.shares_gpu)
    return (
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        *("--gpu-memory-utilization", f"{share:g}"),
        *(("--enable-sleep-mode",) if spec.shares_gpu else ()),
    )


def _vllm_weight_flags(config: ExperimentConfig, spec: ServerSpec) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if config.model.lora is not None:
        rank = find_vllm_lora_rank(config.model.lora.rank)
        flags += ("--enable-lora", "--max-lora-rank", str(rank))
        flags += ("--max-loras", str(_NUM_LORAS))
    if spec.use_nccl:
        flags += ("--weight-transfer-config", '{"backend": "nccl"}')
    if spec.untied_head:
        flags += ("--load-format", "dummy")
        flags += ("--hf-overrides", '{"tie_word_embeddings": false}')
    return flags


def find_vllm_lora_rank(rank: int) -> int:
    """What vLLM must be told of adapters of ``rank``: it takes some numbers only."""
    return next((known for known in _VLLM_LORA_RANKS if known >= rank), rank)


def build_sglang_plan(config: ExperimentConfig, spec: ServerSpec) -> Command:
    """argv and environment of an SGLang server, which reads its key from ``spec.key_path``."""
    share = resolve_gpu_memory_utilization(config.engine, is_shared=spec.shares_gpu)
    command = build_sglang_command(
        config.engine.model_copy(update={"gpu_memory_utilization": share}),
        python=resolve_python(config),
        model_path=spec.model_folder,
        model_name=config.model.path,
        dtype=config.model.dtype,
        port=spec.port,
        # Stands in a file that is written when the server starts.
        api_key=_NO_KEY,
        settings_path=spec.key_path,
        lora_rank=config.model.lora.rank if config.model.lora is not None else None,
    )
    return command.argv, _common_env(config, spec) | command.env


def resolve_python(config: ExperimentConfig) -> str:
    """The interpreter of servers."""
    return str(Path(config.engine.python).expanduser()) if config.engine.python else sys.executable


def _common_env(config: ExperimentConfig, spec: ServerSpec) -> dict[str, str]:
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        "PYTHONUNBUFFERED": "1",
        # Else a file in the current folder that is named like a package would be imported.
        "PYTHONSAFEPATH": "1",
    }
    if not spec.gpus:
        env["OMP_NUM_THREADS"] = str(spec.num_threads)
    if all(Path(path).is_dir() for path in (spec.model_folder, config.tokenizer_path or "/")):
        env["HF_HUB_OFFLINE"] = "1"
    return env
