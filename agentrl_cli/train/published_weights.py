"""What a learner publishes of its model: all weights, or those of its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.models.lora import ADAPTER_NAME, to_saved_name

_BASE_LAYER = ".base_layer."


class PublishedWeights(Protocol):
    """The model's tensors under the names that an engine knows them by."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as they are now; tied ones once, under the first of their names."""
        ...


class WholeWeights:
    """All tensors of a model without adapters, not copied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by Hugging Face name."""
        return _drop_tied(self._model.state_dict())


class MergedWeights:
    """All tensors of a model with an adapter, which is added to the layers that it is on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names that they have without an adapter."""
        merged = _drop_tied(
            {
                name.replace(_BASE_LAYER, "."): tensor
                for name, tensor in self._model.state_dict().items()
                if ".lora_" not in name
            }
        )
        for layer, module in self._model.named_modules():
            if _has_adapter(module):
                weight = f"{layer}.weight"
                # Added in float32: the sum is rounded once.
                change = module.get_delta_weight(ADAPTER_NAME).float()
                merged[weight] = (merged[weight].float() + change).to(merged[weight].dtype)
        return merged


class AdapterWeights:
    """The adapter's tensors alone, under peft's names, not copied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as peft's file has them."""
        return {
            to_saved_name(name): tensor.detach()
            for name, tensor in self._model.state_dict().items()
            if ".lora_" in name
        }


def choose_published(
    model: PreTrainedModel, published: Literal["whole", "adapter"], *, has_adapter: bool
) -> PublishedWeights:
    """What is published of ``model``."""
    if published == "adapter":
        if not has_adapter:
            raise ValueError("an adapter is to be published, and model.lora is not set")
        return AdapterWeights(model)
    return MergedWeights(model) if has_adapter else WholeWeights(model)


def _drop_tied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    first: dict[int, str] = {}
    return {
        name: tensor.detach()
        for name, tensor in state.items()
        if first.setdefault(tensor.data_ptr(), name) == name
    }


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
