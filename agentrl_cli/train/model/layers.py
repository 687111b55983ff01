"""The layers of a model in training: how they attend, are compiled, and save memory."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.train.model.packed_attention import use_packed_attention


def find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Its decoder layers, first to last; none where transformers does not say which they are."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def prepare_layers(model: PreTrainedModel, device: torch.device, train: TrainConfig) -> None:
    """Makes ``model`` compute packed samples on ``device``, as the engine does: without dropout.

    With it the trainer's logprobs would be of another policy. (Dropout of the attention is never
    applied, see ``packed_attention.py``.)

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
    layers = find_layers(model)
    if not layers:
        raise ModelError(
            f"train.compile: transformers does not say what a layer of {type(model).__name__} is. "
            "Type train.compile=null"
        )
    try:
        _try_compiler(next(model.parameters()).device)
    except RuntimeError as error:
        # Before the compiler's message stands its whole command line.
        found = str(error).rpartition("Output:")[2].partition("Set TORCHDYNAMO_VERBOSE")[0]
        raise ModelError(
            "train.compile is 'layers', and torch.compile does not work here: "
            f"{' '.join(found.split())[:300]}. It needs a C++ compiler: install one (g++, on macOS "
            "clang++), or name it in the environment variable CXX; or type train.compile=null"
        ) from error
    for layer in layers:
        layer.compile(dynamic=True)


@cache
def _try_compiler(device: torch.device) -> None:
    """Compiles a trivial function, so that a missing compiler is found before anything runs.

    Once, however many models (a reference, a critic) are compiled.
    """
    # Code that was compiled before would come from torch's cache on disk.
    never_before = float(time.time_ns())
    torch.compile(lambda tensor: tensor + never_before)(torch.ones(4, device=device))
