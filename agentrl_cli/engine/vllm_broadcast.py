"""Weights that a vLLM server takes from the trainer's GPU, by its weight-transfer engine."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence

#: ``ask(path, body, leg)``: one POST within the publication's deadline.
Ask = Callable[[str, object, str], Awaitable[object]]


async def join_broadcast(ask: Ask, unique_id: bytes, world_size: int) -> None:
    """Makes the server's workers enter the trainer's NCCL group, as ranks 1 and up."""
    info = {
        "rank_offset": 1,
        "world_size": world_size,
        "nccl_unique_id_b64": base64.b64encode(unique_id).decode("ascii"),
        # One broadcast for each tensor: nothing to agree on but names, types and shapes.
        "packed": False,
    }
    await ask("/init_weight_transfer_engine", {"init_info": info}, "entering the NCCL group")


async def receive_broadcast(
    ask: Ask, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> None:
    """Makes the server take one broadcast for each tensor as its new weights."""
    info = {
        "names": list(names),
        "dtype_names": list(dtype_names),
        "shapes": [list(shape) for shape in shapes],
    }
    await ask("/start_weight_update", {}, "beginning a weight update")
    await ask("/update_weights", {"update_info": info}, "receiving weights")
    # The version is set by itself, as in every kind of transfer.
    await ask("/finish_weight_update", {}, "finishing a weight update")
