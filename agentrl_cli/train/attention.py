"""Causal attention over packed sequences, registered with transformers under one name.

The sequences of a micro-batch lie end to end in one row; each attends to itself alone.
No mask of [tokens, tokens] is ever made: CUDA in half precision uses torch's
variable-length kernel, everything else one causal call per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from agentrl_cli.errors import ModelError

PACKED_ATTENTION = "agentrl_packed"

_HALF_PRECISION = (torch.float16, torch.bfloat16)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes ``model`` attend within the packed sequences that :func:`packing_arguments` names.

    Raises:
        ModelError: the architecture has its attention built in.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ModelError(
            f"model.path: {type(model).__name__} does not take its attention from transformers' "
            "AttentionInterface, so packed samples would see each other. Allowed: architectures "
            "that do, such as Qwen2, Qwen3, Llama and Mistral"
        )


def packing_arguments(lengths: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the model's forward that tell the attention where sequences end."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return {
        "sequence_lengths": tuple(lengths),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def packed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_lengths: Sequence[int] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The attention output [1, tokens, heads, width] of packed sequences, and no weights.

    ``query`` is [1, heads, tokens, width]; ``key`` and ``value`` may have fewer heads
    (grouped queries). Dropout is never applied: the engine sampled without it. Without
    ``sequence_lengths`` every row is one sequence.

    Raises:
        ModelError: the architecture changes the attention's scores (Gemma 2, gpt-oss).
    """
    if softcap is not None or s_aux is not None:
        raise ModelError(
            "model.path: this architecture caps its attention scores or has attention sinks, "
            "which agentrl does not train. Allowed: architectures without, such as Qwen2, Qwen3, "
            "Llama and Mistral"
        )
    if attention_mask is not None:
        raise ValueError("packed attention takes no attention_mask: pass sequence_lengths")
    if sequence_lengths is None or len(sequence_lengths) == 1:
        return _attend(query, key, value, scaling, sliding_window).transpose(1, 2), None
    if query.is_cuda and query.dtype in _HALF_PRECISION:
        if cu_seq_lens_q is None or max_length_q is None:
            raise ValueError("packed attention on CUDA needs cu_seq_lens_q and max_length_q")
        return (
            _attend_varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window),
            None,
        )
    parts = [
        _attend(q, k, v, scaling, sliding_window)
        for q, k, v in zip(
            torch.split(query, list(sequence_lengths), dim=2),
            torch.split(key, list(sequence_lengths), dim=2),
            torch.split(value, list(sequence_lengths), dim=2),
            strict=True,
        )
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """One causal call; a mask is made only where the window is shorter than the sequence."""
    num_tokens = query.shape[2]
    window_mask = None
    if sliding_window is not None and sliding_window < num_tokens:
        position = torch.arange(num_tokens, device=query.device)
        distance = position[:, None] - position[None, :]
        window_mask = (distance >= 0) & (distance < sliding_window)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=window_mask,
        is_causal=window_mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequence_ends: Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """All sequences in one kernel call, [1, tokens, heads, width]."""
    from torch.nn.attention.varlen import varlen_attn

    # transformers counts the token itself in its window, the kernel only those before it.
    look_back = -1 if sliding_window is None else sliding_window - 1
    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sequence_ends,
        sequence_ends,
        max_length,
        max_length,
        scale=scaling,
        window_size=(look_back, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if not isinstance(output, Tensor):
        raise TypeError("varlen_attn returned auxiliary outputs that were not asked for")
    return output[None]
