"""What a learner publishes of its model: all weights, or those of its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.models.lora import ADAPTER_NAME, to_parameter_name, to_saved_name

_BASE_LAYER = ".base_layer."


class PublishedWeights(Protocol):
    """The model's tensors under the names that an engine knows them by."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors as they are now; tied ones once, under the first of their names."""
        ...

    def names(self) -> dict[str, str]:
        """Every name of a published tensor -> the name it has in :meth:`tensors`."""
        ...

    def locate(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The parameters of the model, by name, with which it has ``tensor`` as ``name``."""
        ...


class WholeWeights:
    """All tensors of a model without adapters, not copied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by Hugging Face name."""
        state = self._model.state_dict()
        return {name: state[name].detach() for name in dict.fromkeys(self.names().values())}

    def names(self) -> dict[str, str]:
        """Every Hugging Face name -> the first that has the same tensor."""
        return _find_first_names(self._model.state_dict())

    def locate(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor itself."""
        return {name: _like(self._model.state_dict()[name], tensor)}


class MergedWeights:
    """All tensors of a model with an adapter, which is added to the layers that it is on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names that they have without an adapter."""
        state = self._base_state()
        merged = {name: state[name].detach() for name in dict.fromkeys(self.names().values())}
        for layer, module in self._model.named_modules():
            if _has_adapter(module):
                weight = f"{layer}.weight"
                # Added in float32: the sum is rounded once.
                change = module.get_delta_weight(ADAPTER_NAME).float()
                merged[weight] = (merged[weight].float() + change).to(merged[weight].dtype)
        return merged

    def names(self) -> dict[str, str]:
        """Every name without an adapter -> the first that has the same tensor."""
        return _find_first_names(self._base_state())

    def locate(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The layer's own tensor, its adapter silenced."""
        state = self._model.state_dict()
        if name in state:
            return {name: _like(state[name], tensor)}
        layer, _, kind = name.rpartition(".")
        own = f"{layer}{_BASE_LAYER}{kind}"
        located = {own: _like(state[own], tensor)}
        if kind == "weight":
            output = f"{layer}.lora_B.{ADAPTER_NAME}.weight"
            located[output] = torch.zeros_like(state[output])
        return located

    def _base_state(self) -> dict[str, Tensor]:
        return {
            name.replace(_BASE_LAYER, "."): tensor
            for name, tensor in self._model.state_dict().items()
            if ".lora_" not in name
        }


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

    def names(self) -> dict[str, str]:
        """Each name itself: an adapter has no tied tensors."""
        return {name: name for name in self.tensors()}

    def locate(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensor under the model's name for it."""
        own = to_parameter_name(name)
        return {own: _like(self._model.state_dict()[own], tensor)}


def choose_published(
    model: PreTrainedModel, published: Literal["whole", "adapter"], *, has_adapter: bool
) -> PublishedWeights:
    """What is published of ``model``."""
    if published == "adapter":
        if not has_adapter:
            raise ValueError("an adapter is to be published, and model.lora is not set")
        return AdapterWeights(model)
    return MergedWeights(model) if has_adapter else WholeWeights(model)


def _find_first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(tensor.data_ptr(), name) for name, tensor in state.items()}


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")


def _like(own: Tensor, tensor: Tensor) -> Tensor:
    return tensor.to(device=own.device, dtype=own.dtype)
