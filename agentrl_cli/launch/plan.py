"""From a resolved run to the processes that it starts: pure, nothing is run."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import agentrl_cli.engine
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Gpus, ResolvedRun, ResolvedServer
from agentrl_cli.engine.protocol import MAX_TOP_LOGPROBS
from agentrl_cli.secret_masking import mask_secrets

#: Holds the modules of agentrl's that a vLLM server imports; standard library only.
_VLLM_PLUGIN_FOLDER = Path(agentrl_cli.engine.__file__).parent / "vllm" / "plugin"
_KEY_AUTH = "agentrl_vllm_auth.KeyAuth"

#: Calls in flight get this long when a server is asked to end.
DRAIN_SECONDS = 5
#: vLLM allocates adapters by these ranks only.
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: SGLang 0.5.23 keeps up to eight positions of the context for itself: of 512, a prompt may have
#: 505 tokens, and prompt and completion together 510.
_RESERVED_POSITIONS = 8
#: The address of a socket has 107 bytes, of which its own name takes 37.
_MAX_SOCKET_FOLDER_CHARS = 70

_SGLANG_ENV = {
    # Otherwise logprobs are those at temperature 1, whatever the temperature was.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
    # The reserved positions may lie beyond the model's last; none of them is ever computed.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
    # /health is asked often and stays cheap; /health_generate samples a token all the same.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
}
_TRAINER_PROGRAM = "agentrl_cli.launch.processes.trainer_program"
_ROLLOUT_PROGRAM = "agentrl_cli.launch.rollout_workers.rollout_program"
#: One thread for each rollout worker, since many share the cores.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process of a run, by name."""

    name: str
    role: Literal["command", "trainer", "engine", "rollout"]
    argv: tuple[str, ...] = ()
    """Empty: the command that the user typed is itself this process. Trainers and rollout workers
    get the descriptor of a socket as a further argument."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the command. It holds no keys: those of a server are made when
    it starts."""
    devices: str = "cpu"
    """On a cluster their number: it chooses."""


def build_plan(
    config: ExperimentConfig,
    run: ResolvedRun,
    *,
    model_folder: str | None = None,
    private_dir: str = "PRIVATE_FOLDER",
) -> list[PlannedProcess]:
    """The processes of a run: the command's own, servers, the trainer's ranks, rollout workers.

    Args:
        config: the experiment.
        run: what it comes to on this machine.
        model_folder: what servers load; None: ``model.path`` as it stands.
        private_dir: folder of the files from which SGLang servers read their keys, and of the
            sockets and temporary files that servers leave behind when they are killed; vLLM's
            semaphores are named after it.
    """
    if run.is_one_process:
        devices = _format_devices(run, run.trainers[0])
        return [PlannedProcess(name="trainer", role="command", devices=devices)]
    plan = [PlannedProcess(name="command", role="command")]
    if run.by_torchrun:
        devices = _format_devices(run, run.trainers[0])
        plan = [PlannedProcess(name="trainer", role="command", devices=devices)]
    for server in run.servers:
        argv, env = _build_server_command(
            config, run, server, model_folder or config.model.path, private_dir
        )
        devices = _format_devices(run, server.gpus)
        plan.append(
            PlannedProcess(name=server.name, role="engine", argv=argv, env=env, devices=devices)
        )
    for rank, gpus in enumerate(() if run.by_torchrun else run.trainers):
        plan.append(
            PlannedProcess(
                name="trainer" if rank == 0 else f"trainer-{rank}",
                role="trainer",
                argv=(sys.executable, "-m", _TRAINER_PROGRAM),
                env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus and not run.on_cluster else {},
                devices=_format_devices(run, gpus),
            )
        )
    plan += map(plan_rollout_worker, range(run.num_rollout_workers))
    return plan


def plan_rollout_worker(index: int) -> PlannedProcess:
    """One of the processes that run the trajectories."""
    argv = (sys.executable, "-u", "-m", _ROLLOUT_PROGRAM)
    env = {name: value for name, value in _THREADS.items() if name not in os.environ}
    return PlannedProcess(name=f"rollout-{index}", role="rollout", argv=argv, env=env)


def format_plan(plan: list[PlannedProcess]) -> str:
    """The plan as lines to read, secrets masked."""
    lines = []
    for process in plan:
        env = "".join(f"{k}={shlex.quote(v)} " for k, v in process.env.items())
        words = mask_secrets(list(process.argv))
        argv = shlex.join(words) if process.argv else "(this command)"
        lines.append(f"{process.name:<12} {process.role:<12} {process.devices:<8} {env}{argv}")
    return "\n".join(lines)


def _format_devices(run: ResolvedRun, gpus: Gpus) -> str:
    if run.on_cluster and gpus:
        return f"{len(gpus)} GPU"
    return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cpu"


def _build_server_command(
    config: ExperimentConfig,
    run: ResolvedRun,
    server: ResolvedServer,
    model_folder: str,
    private_dir: str,
) -> tuple[tuple[str, ...], dict[str, str]]:
    """argv and environment of a server; its key is not among them."""
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(server.gpus),
        "PYTHONUNBUFFERED": "1",
        # Else a file in the current folder that is named like a package would be imported.
        "PYTHONSAFEPATH": "1",
    }
    if len(private_dir) <= _MAX_SOCKET_FOLDER_CHARS:
        env["TMPDIR"] = private_dir
        # What torch has compiled is to be found by the next run.
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
        env["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compiled))
    if not server.gpus:
        env["OMP_NUM_THREADS"] = str(run.num_server_threads)
    if all(Path(path).is_dir() for path in (model_folder, config.tokenizer_path or "/")):
        env["HF_HUB_OFFLINE"] = "1"
    if run.engine_kind == "vllm":
        argv = _list_vllm_words(config, run, server, model_folder)
        env |= _build_vllm_env(config, run, server)
        env["AGENTRL_SEMAPHORES"] = Path(private_dir).name
    else:
        key_path = f"{private_dir}/{server.name}.yaml"
        argv = _list_sglang_words(config, run, server, model_folder, key_path)
        env |= _SGLANG_ENV
    return (*argv, *config.engine.server_args), env


def _list_vllm_words(
    config: ExperimentConfig, run: ResolvedRun, server: ResolvedServer, model_folder: str
) -> list[str]:
    engine = config.engine
    return [
        # It starts vLLM's api_server.
        *(run.server_python, "-m", "agentrl_vllm_start"),
        *("--model", model_folder, "--served-model-name", config.model.path),
        *(("--tokenizer", config.tokenizer_path) if config.tokenizer_path else ()),
        *("--dtype", config.model.dtype, "--max-model-len", str(engine.max_model_len)),
        *("--max-num-seqs", str(engine.max_num_seqs), "--scheduling-policy", "priority"),
        *("--host", server.host, "--port", str(server.port)),
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
        *("--seed", str((config.seed * 1009 + run.servers.index(server)) % 2**31)),
        *("--middleware", _KEY_AUTH, "--disable-uvicorn-access-log"),
        *("--shutdown-timeout", str(DRAIN_SECONDS)),
        *(_list_device_flags(config, server)),
        *(_list_weight_flags(config, run)),
    ]


def _build_vllm_env(
    config: ExperimentConfig, run: ResolvedRun, server: ResolvedServer
) -> dict[str, str]:
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_VLLM_PLUGIN_FOLDER), run.python_path))),
        # Opens the endpoints that take new weights.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if config.model.lora is not None:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if not server.gpus:
        env |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # With the uni executor: two processes instead of three, and a start that is
            # shorter by a third.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return env


def _list_device_flags(config: ExperimentConfig, server: ResolvedServer) -> tuple[str, ...]:
    engine = config.engine
    if not server.gpus:
        return (
            *("--enforce-eager", "--distributed-executor-backend", "uni"),
            # vLLM 0.32 on CPU dies of a request with a seed whose prompt it takes in pieces
            # ("CPU Generator does not use offset").
            "--no-enable-chunked-prefill",
            # Whole blocks are shared, and its own 128 tokens are more than many prompts have: a
            # group's members would each prefill them.
            *("--block-size", "32"),
            *("--kv-cache-memory-bytes", str(int(engine.cpu_kv_cache_gib * 1024**3))),
        )
    return (
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        *("--gpu-memory-utilization", f"{server.gpu_memory_utilization:g}"),
        *(("--enable-sleep-mode",) if server.shares_gpu else ()),
    )


def _list_weight_flags(config: ExperimentConfig, run: ResolvedRun) -> list[str]:
    flags = []
    if config.model.lora is not None:
        rank = find_vllm_lora_rank(config.model.lora.rank)
        # While a new adapter is loaded, calls of the one before are still in flight.
        flags += ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", "2"]
    elif run.weight_transfer == "nccl" and run.purpose == "train" and run.serves_on_gpu:
        flags += ["--weight-transfer-config", '{"backend": "nccl"}']
    if run.untied_head:
        flags += ["--load-format", "dummy", "--hf-overrides", '{"tie_word_embeddings": false}']
    return flags


def find_vllm_lora_rank(rank: int) -> int:
    """What vLLM must be told of adapters of ``rank``: it takes some numbers only."""
    return next((known for known in _VLLM_LORA_RANKS if known >= rank), rank)


def _list_sglang_words(
    config: ExperimentConfig,
    run: ResolvedRun,
    server: ResolvedServer,
    model_folder: str,
    key_path: str,
) -> list[str]:
    engine = config.engine
    argv = [
        # The key is in that file: a command line can be read by everyone on the machine.
        *(run.server_python, "-m", "sglang.launch_server", "--config", key_path),
        *("--model-path", model_folder, "--served-model-name", config.model.path),
        *("--dtype", config.model.dtype),
        *("--host", server.host, "--port", str(server.port), "--log-level-http", "warning"),
        *("--context-length", str(engine.max_model_len + _RESERVED_POSITIONS)),
        *("--max-running-requests", str(engine.max_num_seqs)),
        *("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
        "--enable-metrics",
        *("--mem-fraction-static", str(server.gpu_memory_utilization)),
        *("--tensor-parallel-size", str(engine.tensor_parallel_size)),
        # Otherwise each piece of a stream repeats all that came before.
        "--incremental-streaming-output",
    ]
    if config.model.lora is not None:
        # Names of the layers come with each adapter; the buffers are for all that may come.
        argv += ["--enable-lora", "--max-lora-rank", str(config.model.lora.rank)]
        argv += ["--lora-target-modules", "all"]
    return argv
