"""Published weights into a live model, in place and by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from agentrl_cli.errors import EngineError, format_nearest


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces every parameter of ``model``; nothing is changed if anything does not fit.

    Parameters that share a tensor (tied embeddings) may be given under any of their
    names, or under several if the values agree.

    Raises:
        EngineError: naming what is unknown, missing, of another shape, or contradictory.
    """
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    problems = [
        f"{name}: unknown; {format_nearest(name, targets, max_listed=4)}"
        for name in weights
        if name not in targets
    ]
    problems += [
        f"{name}: shape {tuple(weights[name].shape)}, the model has {tuple(target.shape)}"
        for name, target in targets.items()
        if name in weights and weights[name].shape != target.shape
    ]
    chosen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, target in targets.items():
        if name not in weights:
            continue
        first_name, first = chosen.setdefault(id(target), (name, weights[name]))
        if first is not weights[name] and not torch.equal(first, weights[name]):
            problems.append(f"{name}: tied to {first_name} in the model, but their values differ")
    problems += [
        f"{name}: missing"
        for name, parameter in model.named_parameters()
        if id(parameter) not in chosen
    ]
    if problems:
        shown = "\n  ".join(problems[:8])
        more = f"\n  ... and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise EngineError(
            f"the published weights do not fit the engine's model:\n  {shown}{more}\n"
            "Nothing was replaced. Publish every parameter under its Hugging Face name."
        )
    # Tensors may come from another stream of the same device, and may still be in the making.
    _synchronize(model)
    for target in targets.values():
        if id(target) in chosen:
            target.copy_(chosen[id(target)][1])
    _synchronize(model)


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
