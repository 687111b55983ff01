"""From the configuration to the way in which weights reach the servers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import ExperimentConfig, LoraConfig
from agentrl_cli.config.resolved_run import TransferKind
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import WeightTransfer, WeightUpdate
from agentrl_cli.engine.weights.nccl_transfer import NcclTransfer
from agentrl_cli.engine.weights.weight_folders import VersionFolders
from agentrl_cli.log import SilentObserver

if TYPE_CHECKING:
    import torch

#: A call continues with the adapter that it began with, which vLLM may have to read again.
_NUM_KEPT_ADAPTERS = 16
#: What peft puts after the name of a layer.
_LAYER_END = ".lora_A.weight"


#: From a server's name and a folder of this machine to the folder where the server finds it.
Deliver = Callable[[str, Path], Awaitable[Path]]


async def _leave(_server: str, folder: Path) -> Path:
    return folder


def build_weight_transfer(
    config: ExperimentConfig,
    *,
    model_folder: str,
    tied_names: Mapping[str, str],
    kind: TransferKind,
    on_message: Callable[[str], None] | None = None,
    deliver: Deliver | None = None,
) -> WeightTransfer:
    """How the trainer's weights reach the servers; nothing is written yet.

    Args:
        config: the experiment's.
        model_folder: folder or hub id that the servers loaded.
        tied_names: further name of a tensor -> the name the learner publishes it under, where
            the servers hold both (a head that was untied when they started).
        kind: the way that was chosen for this run.
        on_message: gets what a person should know, a line each.
        deliver: gives a server's machine a copy of a folder; None: the server sees it as it is, as
            all do that of ``engine.weight_transfer.dir``.
    """
    engine = config.engine
    if engine.weight_transfer.dir is not None:
        deliver = None
    directory, timeout_seconds = engine.weight_transfer.dir, engine.publish_timeout_seconds
    if kind == "lora":
        if config.model.lora is None:
            raise ValueError("engine.weight_transfer.kind lora needs model.lora")
        folders = VersionFolders(
            directory,
            "adapter_model.safetensors",
            timeout_seconds=timeout_seconds,
            num_kept=_NUM_KEPT_ADAPTERS,
        )
        return LoraTransfer(folders, config.model.lora, base_model=model_folder, deliver=deliver)
    folders = VersionFolders(directory, "model.safetensors", timeout_seconds=timeout_seconds)
    files = FolderTransfer(folders, tied_names=tied_names, deliver=deliver)
    if kind == "disk":
        return files
    return NcclTransfer(
        files,
        num_gpus_per_server=engine.tensor_parallel_size,
        timeout_seconds=timeout_seconds,
        on_message=on_message or SilentObserver().on_message,
    )


class FolderTransfer:
    """All weights as a safetensors file that each server reads for itself.

    The file is also the snapshot: the learner may change its tensors as soon as
    :meth:`prepare` returns, and a server that comes back later still finds them.
    """

    def __init__(
        self,
        folders: VersionFolders,
        *,
        tied_names: Mapping[str, str],
        deliver: Deliver | None = None,
    ) -> None:
        """``tied_names``: further name of a tensor -> the name it is published under; both are
        written, for servers that keep the two apart."""
        self._folders = folders
        self._deliver = deliver or _leave
        self._tied_names = dict(tied_names)

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Writes the weights; raises as :meth:`VersionFolders.write`."""
        # safetensors refuses to write one tensor under two names.
        copies = {
            alias: weights[name].clone()
            for alias, name in self._tied_names.items()
            if alias not in weights
        }
        folder = await self._folders.write(version, {**weights, **copies})

        async def apply(server: EngineServer) -> None:
            await server.load_weights(await self._deliver(server.endpoint.name, folder))

        return WeightUpdate(version, apply)

    async def close(self) -> None:
        """Deletes the files."""
        self._folders.close()


class LoraTransfer:
    """The adapter alone, as a folder in peft's format that servers load beside the base model."""

    def __init__(
        self,
        folders: VersionFolders,
        lora: LoraConfig,
        *,
        base_model: str,
        deliver: Deliver | None = None,
    ) -> None:
        self._folders = folders
        self._deliver = deliver or _leave
        self._lora = lora
        self._base_model = base_model

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Writes the adapter; raises as :meth:`VersionFolders.write`.

        Raises:
            ValueError: ``weights`` are not those of an adapter.
        """
        text = build_adapter_config(self._lora, weights, base_model=self._base_model)
        folder = await self._folders.write(version, weights, {"adapter_config.json": text})

        async def apply(server: EngineServer) -> None:
            await server.load_adapter(await self._deliver(server.endpoint.name, folder), version)

        return WeightUpdate(version, apply)

    async def close(self) -> None:
        """Deletes the files."""
        self._folders.close()


def build_adapter_config(
    lora: LoraConfig, weights: Mapping[str, torch.Tensor], *, base_model: str
) -> str:
    """peft's ``adapter_config.json`` for adapter tensors under peft's names."""
    layers = {
        name.removesuffix(_LAYER_END).rpartition(".")[2]
        for name in weights
        if name.endswith(_LAYER_END)
    }
    if not layers:
        raise ValueError("a LoRA transfer publishes the adapter's tensors: there are none")
    return json.dumps(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": lora.rank,
            "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            "target_modules": sorted(layers),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        },
        indent=2,
    )
