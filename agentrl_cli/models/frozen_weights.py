"""Weights that do not change while the rest of a model is trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from agentrl_cli.errors import ModelError, format_nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Names for what is elsewhere in every architecture.
_EMBEDDINGS, _HEAD = "embeddings", "head"


def freeze_weights(model: PreTrainedModel, frozen: Sequence[str]) -> None:
    """Leaves some weights out of the training: they get no gradient and no optimizer state.

    Args:
        model: in training; nothing of it is frozen yet.
        frozen: ``embeddings``, ``head`` (one of them is both where a model has them tied), or
            patterns of parameter names such as ``model.layers.0.*``.

    Raises:
        ModelError: a name matches no weight, or none is left to train.
    """
    for name in frozen:
        chosen = _find_parameters(model, name)
        if not chosen:
            modules = {part for part, _ in model.named_modules() if part}
            patterns = sorted(f"{part}.*" for part in modules)
            raise ModelError(
                f"model.frozen: {name!r} matches no weight of {type(model).__name__}; "
                f"{format_nearest(name, [_EMBEDDINGS, _HEAD, *patterns])}. A pattern is matched "
                "with the whole name of a weight, such as "
                f"{next(n for n, _ in model.named_parameters())}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"model.frozen: {', '.join(frozen)} leaves nothing of {type(model).__name__} to "
            "train. Remove something from it, or type model.frozen=[]"
        )


def _find_parameters(model: PreTrainedModel, name: str) -> list[nn.Parameter]:
    if name == _EMBEDDINGS:
        return list(model.get_input_embeddings().parameters())
    if name == _HEAD:
        return list(model.get_output_embeddings().parameters())
    return [
        parameter
        # Of two names of one tensor either will do.
        for full_name, parameter in model.named_parameters(remove_duplicate=False)
        if fnmatchcase(full_name, name)
    ]
