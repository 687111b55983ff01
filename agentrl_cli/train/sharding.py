"""A model in shards over ranks (FSDP2), and whole copies of it where one is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from agentrl_cli.train.layers import find_layers


def shard_module(
    root: nn.Module, model: PreTrainedModel, mesh: DeviceMesh, dtype: torch.dtype
) -> FSDPModule:
    """``root``, which holds ``model``, with its weights divided among the ranks, in place.

    A layer's weights are put together while it computes, in ``dtype``; gradients are summed over
    the ranks in float32. Embeddings, the last norm and the output head, which may be tied or
    used several times, are one part of the root's. Nothing is sent by this.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        # Temperatures and positions, for example, stay as they are.
        cast_forward_inputs=False,
    )
    for layer in find_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded = fully_shard(root, mesh=mesh, mp_policy=policy)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no scaled sum.
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def build_skeleton(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same modules with parameters that take no memory, of ``dtype``."""
    return _copy_with(
        model,
        {p: torch.empty_like(p, dtype=dtype, device="meta") for p in model.parameters()},
    )


def gather_model(
    skeleton: PreTrainedModel,
    model: PreTrainedModel,
    *,
    keep: bool,
    device: torch.device,
    wanted: Callable[[str], bool] = lambda _: True,
) -> PreTrainedModel | None:
    """A whole copy of the sharded ``model`` on ``device``; None where it is not to be kept.

    Called by all ranks. A rank that keeps nothing holds one parameter at a time.

    Args:
        skeleton: of :func:`build_skeleton`; says in which dtype.
        model: has the shards.
        keep: for rank 0.
        device: of the copy.
        wanted: by parameter name; others take no memory in the copy.
    """
    own = dict(model.named_parameters())
    gathered: dict[nn.Parameter, Tensor] = {}
    for name, empty in skeleton.named_parameters():
        gathered[empty] = empty
        if wanted(name):
            whole = gather(own[name].detach().to(empty.dtype))
            if keep:
                gathered[empty] = whole.to(device)
    return _copy_with(skeleton, gathered) if keep else None


def gather_named(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors whole and on the CPU, empty where they are not to be kept; called by all."""
    kept = {}
    for name, tensor in tensors.items():
        whole = gather(tensor.detach())
        if keep:
            kept[name] = whole.cpu()
    return kept


def gather(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be in shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be in shards; not a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def place_like(whole: Tensor, like: Tensor) -> Tensor:
    """``whole`` on the device of ``like``, and in shards as ``like`` is; nothing is sent."""
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
    """A deep copy in which other tensors stand for the parameters, tied ones as before."""
    memo = {
        id(old): new
        if isinstance(new, nn.Parameter)
        else nn.Parameter(new, requires_grad=old.requires_grad)
        for old, new in replacements.items()
    }
    return copy.deepcopy(model, memo)
