"""The command lines of vLLM and SGLang servers, and the environment that they need."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import agentrl_cli.engine
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun, ResolvedServer
from agentrl_cli.engine.protocol import MAX_TOP_LOGPROBS

#: Holds the module of agentrl's that a vLLM server imports; standard library only.
VLLM_PLUGIN_FOLDER = Path(agentrl_cli.engine.__file__).parent / "vllm" / "plugin"
_KEY_AUTH = "agentrl_vllm_auth.KeyAuth"

#: Calls in flight get this long when a server is asked to end.
DRAIN_SECONDS = 5
#: vLLM allocates adapters by these ranks only.
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: While a new adapter is loaded, calls of the one before are still in flight.
_NUM_LORAS = 2
_GIB = 1024**3
#: SGLang 0.5.23 keeps up to eight positions of the context for itself: of 512, a prompt may have
#: 505 tokens, and prompt and completion together 510.
_RESERVED_POSITIONS = 8

_SGLANG_ENV = {
    # Otherwise logprobs are those at temperature 1, whatever the temperature was.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    # The reserved positions may lie beyond the model's last; none of them is ever computed.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
    # /health is asked often and stays cheap; /health_generate samples a token all the same.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What one server is started with, besides the configuration."""

    index: int
    model_folder: str
    """Folder or hub id."""
    port: int
    run: ResolvedRun
    key_path: str
    """File that an SGLang server reads its key from."""

    @property
    def server(self) -> ResolvedServer:
        """Where it runs."""
        return self.run.servers[self.index]


Command = tuple[tuple[str, ...], Mapping[str, str]]


def build_vllm_command(config: ExperimentConfig, spec: ServerSpec) -> Command:
    """argv and environment of a vLLM server; its key is not among them."""
    engine = config.engine
    argv = [
        *(spec.run.server_python, "-m", "vllm.entrypoints.openai.api_server"),
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
        # Else vLLM would fall back to another grammar library where xgrammar refuses, and the
        # trainer, which must make the same masks, would make others.
        *("--structured-outputs-config", '{"backend": "xgrammar"}'),
        # Else the model's own file would change what a request leaves out, such as top_k.
        *("--generation-config", "vllm"),
        # Servers of one seed would sample the same completions for a group's members.
        *("--seed", str((config.seed * 1009 + spec.index) % 2**31)),
        *("--middleware", _KEY_AUTH, "--disable-uvicorn-access-log"),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        *(_vllm_device_flags(config, spec)),
        *(_vllm_weight_flags(config, spec)),
        *engine.server_args,
    ]
    env = _common_env(config, spec) | {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(VLLM_PLUGIN_FOLDER), spec.run.python_path))
        ),
        # Opens the endpoints that take new weights.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.model.lora is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not spec.server.gpus:
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
    if not spec.server.gpus:
        num_bytes = int(engine.cpu_kv_cache_gib * _GIB)
        return (
            *("--enforce-eager", "--distributed-executor-backend", "uni"),
            # vLLM 0.32 on CPU dies of a request with a seed whose prompt it takes in pieces
            # ("CPU Generator does not use offset").
            "--no-enable-chunked-prefill",
            *("--kv-cache-memory-bytes", str(num_bytes)),
        )
    share = spec.server.gpu_memory_utilization
    return (
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        *("--gpu-memory-utilization", f"{share:g}"),
        *(("--enable-sleep-mode",) if spec.server.shares_gpu else ()),
    )


def _vllm_weight_flags(config: ExperimentConfig, spec: ServerSpec) -> tuple[str, ...]:
    flags: tuple[str, ...] = ()
    if config.model.lora is not None:
        rank = find_vllm_lora_rank(config.model.lora.rank)
        flags += ("--enable-lora", "--max-lora-rank", str(rank))
        flags += ("--max-loras", str(_NUM_LORAS))
    if _takes_nccl(config, spec):
        flags += ("--weight-transfer-config", '{"backend": "nccl"}')
    if spec.run.untied_head:
        flags += ("--load-format", "dummy")
        flags += ("--hf-overrides", '{"tie_word_embeddings": false}')
    return flags


def _takes_nccl(config: ExperimentConfig, spec: ServerSpec) -> bool:
    """True where weights may come from GPU to GPU."""
    run = spec.run
    may_come = run.weight_transfer == "nccl" and config.model.lora is None
    return may_come and run.purpose == "train" and run.serves_on_gpu


def find_vllm_lora_rank(rank: int) -> int:
    """What vLLM must be told of adapters of ``rank``: it takes some numbers only."""
    return next((known for known in _VLLM_LORA_RANKS if known >= rank), rank)


def build_sglang_command(config: ExperimentConfig, spec: ServerSpec) -> Command:
    """argv and environment of an SGLang server, which reads its key from ``spec.key_path``.

    Its ``--api-key`` protects every endpoint but health checks, and comes from a file
    (:func:`format_sglang_settings`): a command line can be read by everyone on the machine.
    """
    engine = config.engine
    argv = [
        *(spec.run.server_python, "-m", "sglang.launch_server", "--config", spec.key_path),
        *("--model-path", spec.model_folder, "--served-model-name", config.model.path),
        *("--dtype", config.model.dtype),
        *("--host", "127.0.0.1", "--port", str(spec.port), "--log-level-http", "warning"),
        *("--context-length", str(engine.max_model_len + _RESERVED_POSITIONS)),
        *("--max-running-requests", str(engine.max_num_seqs)),
        *("--mem-fraction-static", str(spec.server.gpu_memory_utilization)),
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        # Otherwise each piece of a stream repeats all that came before.
        "--incremental-streaming-output",
    ]
    if config.model.lora is not None:
        # Names of the layers come with each adapter; the buffers are for all that may come.
        argv += ["--enable-lora", "--max-lora-rank", str(config.model.lora.rank)]
        argv += ["--lora-target-modules", "all"]
    return (*argv, *engine.server_args), _common_env(config, spec) | _SGLANG_ENV


def format_sglang_settings(api_key: str) -> str:
    """The content of the file at ``key_path``, for the owner's eyes alone."""
    return f"api-key: {json.dumps(api_key)}\n"


def _common_env(config: ExperimentConfig, spec: ServerSpec) -> dict[str, str]:
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(spec.server.gpus),
        "PYTHONUNBUFFERED": "1",
        # Else a file in the current folder that is named like a package would be imported.
        "PYTHONSAFEPATH": "1",
    }
    if not spec.server.gpus:
        env["OMP_NUM_THREADS"] = str(spec.run.num_server_threads)
    if all(Path(path).is_dir() for path in (spec.model_folder, config.tokenizer_path or "/")):
        env["HF_HUB_OFFLINE"] = "1"
    return env
