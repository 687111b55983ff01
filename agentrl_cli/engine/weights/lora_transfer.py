"""The adapter alone to servers, in peft's format; the base model stays as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import LoraConfig
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.weights.weight_folders import VersionFolders

if TYPE_CHECKING:
    import torch

ADAPTER_FILE_NAME = "adapter_model.safetensors"
#: A call continues with the adapter that it began with, which vLLM may have to read again.
NUM_KEPT_ADAPTERS = 16
_CONFIG_NAME = "adapter_config.json"
#: What peft puts after the name of a layer.
_LAYER_END = ".lora_A.weight"


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """A version's adapter as a folder in peft's format."""

    version: int
    folder: Path

    async def apply(self, server: EngineServer) -> None:
        """Makes ``server`` serve the adapter."""
        await server.load_adapter(self.folder, self.version)


class LoraTransfer:
    """LoraAdapters as peft folders, which servers load beside the base model."""

    def __init__(self, folders: VersionFolders, lora: LoraConfig, *, base_model: str) -> None:
        self._folders = folders
        self._lora = lora
        self._base_model = base_model

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> AdapterUpdate:
        """Writes the adapter; raises as :meth:`VersionFolders.write`.

        Raises:
            ValueError: ``weights`` are not those of an adapter.
        """
        text = build_adapter_config(self._lora, weights, base_model=self._base_model)
        folder = await self._folders.write(version, weights, {_CONFIG_NAME: text})
        return AdapterUpdate(version, folder)

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
