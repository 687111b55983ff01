"""Which GPU belongs to which process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.errors import UserInputError

Purpose = Literal["train", "eval"]
Device = Literal["cpu", "cuda"]

#: Of a GPU's memory, where ``engine.gpu_memory_utilization`` is not set.
_OWN_GPU_SHARE = 0.9
#: The trainer keeps weights, gradients and optimizer state on the same GPU.
_SHARED_GPU_SHARE = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """GPUs by process, as CUDA_VISIBLE_DEVICES names them; none: it computes on the CPU."""

    servers: tuple[tuple[str, ...], ...]
    trainer: tuple[str, ...]

    @property
    def is_any_shared(self) -> bool:
        """True where the trainer computes on a GPU of any server."""
        return any(self.is_shared(index) for index in range(len(self.servers)))

    def is_shared(self, server: int) -> bool:
        """True where the trainer computes on one of the server's GPUs."""
        return bool(set(self.servers[server]) & set(self.trainer))


def resolve_device(engine: EngineConfig, num_gpus: int) -> Device:
    """Where servers compute; where the configuration does not say, by what is there.

    Raises:
        UserInputError: a GPU is asked for and there is none, or fewer than needed.
    """
    device: Device = engine.device or ("cuda" if num_gpus else "cpu")
    if device == "cpu":
        if engine.tensor_parallel_size > 1:
            raise UserInputError(
                f"engine.tensor_parallel_size: {engine.tensor_parallel_size} is the number of GPUs "
                "of one server, and servers compute on the CPU here. Type "
                "engine.tensor_parallel_size=1"
            )
        return device
    if num_gpus == 0:
        raise UserInputError(
            "engine.device: cuda was asked for, and no GPU is to be seen: /dev/nvidia0 is missing, "
            "or CUDA_VISIBLE_DEVICES hides it. Type engine.device=cpu (vLLM for CPU: make vllm), "
            "or engine.kind=embedded"
        )
    needed = engine.num_servers * engine.tensor_parallel_size
    if needed > num_gpus:
        per_server = min(engine.tensor_parallel_size, num_gpus)
        raise UserInputError(
            f"engine.num_servers: {engine.num_servers} with engine.tensor_parallel_size: "
            f"{engine.tensor_parallel_size} needs {needed} GPUs, and this machine shows "
            f"{num_gpus}. Type engine.num_servers={num_gpus // per_server} "
            f"engine.tensor_parallel_size={per_server}"
        )
    return device


def share_gpus(
    engine: EngineConfig, gpu_ids: Sequence[str], device: Device, purpose: Purpose
) -> DeviceShares:
    """GPUs of each server and of the trainer: their own while there are enough.

    With none left over, the trainer computes on the last server's last GPU.
    """
    if device == "cpu":
        return DeviceShares(servers=((),) * engine.num_servers, trainer=tuple(gpu_ids))
    size = engine.tensor_parallel_size
    servers = tuple(
        tuple(gpu_ids[index * size : (index + 1) * size]) for index in range(engine.num_servers)
    )
    if purpose == "eval":
        return DeviceShares(servers=servers, trainer=())
    left = gpu_ids[engine.num_servers * size :]
    return DeviceShares(servers=servers, trainer=tuple(left or gpu_ids[-1:]))


def shares_any_gpu(engine: EngineConfig, num_gpus: int, purpose: Purpose) -> bool:
    """True where a server and the trainer compute on one GPU.

    Raises:
        UserInputError: a GPU is asked for and there is none, or fewer than needed.
    """
    gpu_ids = [str(index) for index in range(num_gpus)]
    device = resolve_device(engine, num_gpus)
    return share_gpus(engine, gpu_ids, device, purpose).is_any_shared


def resolve_gpu_memory_utilization(engine: EngineConfig, *, is_shared: bool) -> float:
    """Share of a GPU's memory that a server takes."""
    return engine.gpu_memory_utilization or (_SHARED_GPU_SHARE if is_shared else _OWN_GPU_SHARE)
