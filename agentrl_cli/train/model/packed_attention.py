"""Causal attention over packed samples, registered with transformers under one name.

The tokens of a micro-batch lie in one row, and each attends to those before it in its samples
alone (see ``prefix_tree.py``). No mask of [tokens, tokens] is ever made: CUDA in half precision
uses torch's variable-length kernel, or flex attention where samples share tokens; the CPU one call
for each segment; sliding windows on a CPU, and float32 on CUDA, one call for each block of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from agentrl_cli.errors import ModelError
from agentrl_cli.train.data.prefix_tree import Segment
from agentrl_cli.train.model.tree_attention import (
    attend_by_blocks,
    attend_in_window,
    attend_on_cpu,
    build_block_mask,
)

PACKED_ATTENTION = "agentrl_packed"

_HALF_PRECISION = (torch.float16, torch.bfloat16)

#: Supported types of layers; others (recurrent, chunked) would mix the samples of a row.
_LAYER_TYPES = ("full_attention", "sliding_attention")


class AttentionLayout:
    """Which tokens of a micro-batch attend to which, for the layers of one forward pass."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        self.num_tokens = segments[-1].end
        self.is_shared = any(not segment.is_root for segment in segments)
        """True: some samples share tokens."""
        self.longest = max(segment.position + segment.end - segment.start for segment in segments)
        """Tokens of the longest sample."""
        self._sequence_ends: Tensor | None = None
        self._block_masks: dict[int | None, Any] = {}

    def find_sequence_ends(self, device: torch.device) -> Tensor:
        """The end of each sequence, after a leading 0: int32 on ``device``; for plain packing."""
        if self._sequence_ends is None:
            ends = torch.tensor([0, *(segment.end for segment in self.segments)])
            self._sequence_ends = ends.to(device, torch.int32)
        return self._sequence_ends

    def find_block_mask(self, sliding_window: int | None, device: torch.device) -> Any:
        """The block mask for flex attention; made once for all layers with this window."""
        if sliding_window not in self._block_masks:
            mask = build_block_mask(self.segments, sliding_window, device)
            self._block_masks[sliding_window] = mask
        return self._block_masks[sliding_window]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Makes ``model`` attend as the ``layout`` that its forward pass is called with says.

    Raises:
        ModelError: the architecture has its attention built in, or layers of another kind.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ModelError(
            f"model.path: {type(model).__name__} does not take its attention from transformers' "
            "AttentionInterface, so packed samples would see each other. Allowed: architectures "
            "that do, such as Qwen2, Qwen3, Llama and Mistral"
        )
    names = ("layer_types", "layers_block_type")
    # Missing where an architecture has one kind only.
    kinds = next((k for name in names if (k := getattr(model.config, name, None))), ())
    others = {*kinds} - {*_LAYER_TYPES}
    if others:
        raise ModelError(
            f"model.path: {type(model).__name__} has layers of type {', '.join(sorted(others))}, "
            "in which packed samples would see each other. Allowed: architectures whose layers "
            f"all have {' or '.join(_LAYER_TYPES)}, such as Qwen2, Qwen3, Llama and Mistral"
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    layout: AttentionLayout | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The attention output [1, tokens, heads, width] of packed samples, and no weights.

    ``query`` is [1, heads, tokens, width]; ``key`` and ``value`` may have fewer heads
    (grouped queries). Dropout is never applied: the engine sampled without it. Without
    ``layout`` every row is one sequence.

    Where layers are compiled, this is not: it depends on the layout, which is another one in every
    micro-batch. (Flex attention is compiled by itself.)

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
        raise ValueError("packed attention takes no attention_mask: pass a layout")
    if query.shape[2] != key.shape[2]:
        raise ValueError("packed attention takes no cache: pass whole sequences, use_cache=False")
    if layout is None:
        layout = AttentionLayout([Segment(0, query.shape[2], query.shape[2], 0)])
        if len(query) > 1:
            rows = [
                _attend(q[None], k[None], v[None], layout, scaling, sliding_window)
                for q, k, v in zip(query, key, value, strict=True)
            ]
            return torch.stack(rows), None
    return _attend(query, key, value, layout, scaling, sliding_window)[None], None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: AttentionLayout,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """The output [tokens, heads, width of a value]."""
    reach = layout.longest if sliding_window is None else sliding_window
    is_windowed = reach < layout.longest
    if query.device.type == "cpu" and not is_windowed:
        width = value.shape[-1]
        padded = pad(value, (0, query.shape[-1] - width))
        output = attend_on_cpu(query[0], key[0], padded[0], layout.segments, scaling)
        return output[..., :width]
    if query.device.type != "cuda" or query.dtype not in _HALF_PRECISION:
        return attend_in_window(query, key, value, layout.segments, scaling, reach)
    window = reach if is_windowed else None
    if layout.is_shared:
        block_mask = layout.find_block_mask(window, query.device)
        return attend_by_blocks(query, key, value, block_mask, scaling)
    # One kernel call for all sequences.
    from torch.nn.attention.varlen import varlen_attn

    # transformers counts the token itself in its window, the kernel only those before it.
    look_back = -1 if window is None else window - 1
    ends = layout.find_sequence_ends(query.device)
    packed = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        ends,
        ends,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(look_back, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    if not isinstance(packed, Tensor):
        raise TypeError("varlen_attn returned auxiliary outputs that were not asked for")
    return packed
