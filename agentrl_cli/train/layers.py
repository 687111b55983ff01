"""The layers of a model in training: how they attend, are compiled, and save memory."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import TrainConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.train.attention import use_packed_attention


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Its decoder layers, from the first to the last; none where transformers names none."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def prepare_layers(model: PreTrainedModel, device: torch.device, train: TrainConfig) -> None:
    """Makes ``model`` compute packed samples on ``device``, as the engine does: without dropout.

    With it the trainer's logprobs would be of another policy. (Dropout of the attention is never
    applied, see ``attention.py``.)

    Raises:
        ModelError: the architecture has its attention built in, or ``train.compile`` asks for
            what cannot be had.
    """
    use_packed_attention(model)
    model.to(device)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if train.compile == "layers":
        _compile_layers(model)


def set_checkpointing(model: PreTrainedModel, *, enabled: bool) -> None:
    """Lets layers recompute their activations, which they do in training mode only."""
    model.train(enabled)
    if enabled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _compile_layers(model: PreTrainedModel) -> None:
    """Makes each layer run as compiled code from its first call on, in place.

    All layers share the code, which serves every length: one compilation with gradients, one
    without. The attention stays as it is, between two compiled pieces of its layer.

    Raises:
        ModelError: there is nothing to compile, or nothing to compile it with.
    """
    # Seconds to import.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    layers = find_layers(model)
    if not layers:
        raise ModelError(
            f"train.compile: transformers does not say what a layer of {type(model).__name__} is. "
            "Type train.compile=null"
        )
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ModelError(
            "train.compile is 'layers', and torch.compile finds no C++ compiler. Install one (g++, "
            "on macOS clang++), name it in the environment variable CXX, or type train.compile=null"
        ) from error
    for layer in layers:
        layer.compile(dynamic=True)
