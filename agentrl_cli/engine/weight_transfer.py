"""From the configuration to the way in which weights reach the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.server import WeightTransfer
from agentrl_cli.engine.weight_transfer_disk import DiskTransfer
from agentrl_cli.engine.weight_transfer_folder import VersionFolders
from agentrl_cli.engine.weight_transfer_lora import (
    ADAPTER_FILE_NAME,
    NUM_KEPT_ADAPTERS,
    LoraTransfer,
)
from agentrl_cli.engine.weight_transfer_nccl import NcclTransfer
from agentrl_cli.log import SilentObserver

TransferKind = Literal["disk", "nccl", "lora"]

_MODEL_FILE_NAME = "model.safetensors"


def resolve_transfer_kind(config: ExperimentConfig, *, num_gpus: int) -> TransferKind:
    """The kind that the configuration asks for; where it asks for none, the fastest that fits.

    Args:
        config: the experiment's; its engine is not the embedded one.
        num_gpus: that this machine has.
    """
    engine = config.engine
    if engine.weight_transfer.kind is not None:
        return engine.weight_transfer.kind
    if config.model.lora is not None:
        return "lora"
    # With as many GPUs as the servers take, the trainer shares one of theirs.
    has_own_gpu = num_gpus > engine.num_servers * engine.tensor_parallel_size
    if engine.kind != "sglang" and engine.device != "cpu" and has_own_gpu:
        return "nccl"
    return "disk"


def build_weight_transfer(
    config: ExperimentConfig,
    *,
    model_folder: str,
    tied_names: Mapping[str, str],
    num_gpus: int,
    on_message: Callable[[str], None] | None = None,
) -> WeightTransfer:
    """The way for the trainer's weights to the servers; nothing is written yet.

    Args:
        config: the experiment's.
        model_folder: folder or hub id that the servers loaded.
        tied_names: further name of a tensor -> the name the learner publishes it under, where
            the servers keep the two apart (a head that was untied at their start).
        num_gpus: that this machine has.
        on_message: gets what a person should know, a line each.
    """
    kind = resolve_transfer_kind(config, num_gpus=num_gpus)
    engine, lora = config.engine, config.model.lora
    if kind == "lora":
        if lora is None:
            raise ValueError("engine.weight_transfer.kind lora needs model.lora")
        adapter_folders = VersionFolders(
            engine.weight_transfer.dir,
            ADAPTER_FILE_NAME,
            timeout_seconds=engine.publish_timeout_seconds,
            num_kept=NUM_KEPT_ADAPTERS,
        )
        return LoraTransfer(adapter_folders, lora, base_model=model_folder)
    folders = VersionFolders(
        engine.weight_transfer.dir,
        _MODEL_FILE_NAME,
        timeout_seconds=engine.publish_timeout_seconds,
    )
    disk = DiskTransfer(
        folders, model_folder=find_local_folder(model_folder), tied_names=tied_names
    )
    if kind == "disk":
        return disk
    return NcclTransfer(
        disk,
        num_gpus_per_server=engine.tensor_parallel_size,
        timeout_seconds=engine.publish_timeout_seconds,
        on_message=on_message or SilentObserver().on_message,
    )


def find_local_folder(model_folder: str) -> Path | None:
    """Where the files of a folder or hub id lie on this machine; None: nowhere."""
    if Path(model_folder).is_dir():
        return Path(model_folder)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model_folder, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
