"""A model sharded over ranks (FSDP2), and whole copies of it where one is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentrl_cli.train.model.layers import find_layers
from agentrl_cli.train.ranks import Ranks


def shard_module(
    root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype
) -> FSDPModule:
    """Shards the weights of ``root``, which holds ``model``, over the ranks, in place.

    A layer's weights are put together while it computes, in ``dtype``; gradients are summed over
    the ranks in float32. Embeddings, the last norm and the output head, which may be tied or
    used several times, are one part of the root's. What ``root`` has beside ``model`` stays
    float32. Nothing is sent by this.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Temperatures and positions, for example, keep their types.
        cast_forward_inputs=False,
    )
    for layer in find_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    for child in root.children():
        if child is not model:
            fully_shard(child, mesh=mesh, mp_policy=replace(policy, param_dtype=None))
    sharded = fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum.
            module.set_force_sum_reduction_for_comms(True)
    return sharded


class WholeCopies:
    """Gives whole copies of a sharded model, and a model that is not sharded itself.

    Made before the model is sharded.

    Args:
        model: will have the shards.
        dtype: of the copies.
        ranks: hold the shards.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        # The same modules, with parameters that take no memory.
        empty = {p: torch.empty_like(p, dtype=dtype, device="meta") for p in model.parameters()}
        self._skeleton = _copy_with(model, empty) if ranks.count > 1 else None

    def gather(
        self, device: torch.device, wanted: Callable[[str], bool] | None = None
    ) -> PreTrainedModel | None:
        """On rank 0 a copy on ``device`` (the model itself where it is not sharded); on the
        others, which take part parameter by parameter, None.

        ``wanted`` chooses by parameter name; others take no memory in the copy.
        """
        if self._skeleton is None:
            return self._model
        keep = self._ranks.index == 0
        own = dict(self._model.named_parameters())
        gathered: dict[nn.Parameter, Tensor] = {}
        for name, empty in self._skeleton.named_parameters():
            gathered[empty] = empty
            if wanted is None or wanted(name):
                whole = gather(own[name].detach().to(empty.dtype))
                if keep:
                    gathered[empty] = whole.to(device)
        return _copy_with(self._skeleton, gathered) if keep else None


def gather_named(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The whole tensors, on the CPU; nothing where ``keep`` is False. Called by all ranks."""
    kept = {}
    for name, tensor in tensors.items():
        whole = gather(tensor.detach())
        if keep:
            kept[name] = whole.cpu()
    return kept


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; called by all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that may be sharded; not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` on the device of ``like``, and sharded as ``like`` is; nothing is sent."""
    whole = whole.to(like.device)
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    placed: DTensor = distribute_tensor(
        whole, like.device_mesh, like.placements, src_data_rank=None
    )
    return placed


def _copy_with(
    model: PreTrainedModel, replacements: Mapping[nn.Parameter, Tensor]
) -> PreTrainedModel:
    """A deep copy with other tensors for its parameters; tied ones stay tied."""
    memo = {
        id(old): new
        if isinstance(new, nn.Parameter)
        else nn.Parameter(new, requires_grad=old.requires_grad)
        for old, new in replacements.items()
    }
    return copy.deepcopy(model, memo)
