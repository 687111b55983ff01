"""From the configuration to the way in which weights reach the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import TransferKind
from agentrl_cli.engine.protocol import WeightTransfer
from agentrl_cli.engine.weights.lora_transfer import (
    ADAPTER_FILE_NAME,
    NUM_KEPT_ADAPTERS,
    LoraTransfer,
)
from agentrl_cli.engine.weights.nccl_transfer import NcclTransfer
from agentrl_cli.engine.weights.weight_folders import FolderTransfer, VersionFolders
from agentrl_cli.log import SilentObserver

_MODEL_FILE_NAME = "model.safetensors"


def build_weight_transfer(
    config: ExperimentConfig,
    *,
    model_folder: str,
    tied_names: Mapping[str, str],
    kind: TransferKind,
    on_message: Callable[[str], None] | None = None,
) -> WeightTransfer:
    """How the trainer's weights reach the servers; nothing is written yet.

    Args:
        config: the experiment's.
        model_folder: folder or hub id that the servers loaded.
        tied_names: further name of a tensor -> the name the learner publishes it under, where
            the servers hold both (a head that was untied when they started).
        kind: the way that was chosen for this run.
        on_message: gets what a person should know, a line each.
    """
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
    files = FolderTransfer(folders, tied_names=tied_names)
    if kind == "disk":
        return files
    return NcclTransfer(
        files,
        num_gpus_per_server=engine.tensor_parallel_size,
        timeout_seconds=engine.publish_timeout_seconds,
        on_message=on_message or SilentObserver().on_message,
    )
