"""Causal attention over a prefix tree: each token attends to its ancestors and itself.

On CPU the kernel is called once per segment: its keys against its own queries and those of
all its descendants, which lie behind it in one piece. A causal call whose first query belongs to
its first key is just that, so no mask is made and nothing is copied; the parts of a token's
attention are joined by their normalizers, and the backward pass needs the joined ones alone (as
in ring attention, arXiv 2310.01889). On CUDA it is flex attention with a block mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention

from agentrl_cli.train.data.prefix_tree import Segment

_HALF_PRECISION = (torch.float16, torch.bfloat16)

#: Queries of one call where a sliding window needs a mask: 2 MiB of bools for a window of 4,096.
_WINDOW_BLOCK = 512

_forward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float | None
) -> Tensor:
    """The attention output, [tokens, heads, width], of ``query`` [heads, tokens, width].

    ``key`` and ``value`` may have fewer heads (grouped queries), but have the width of
    ``query``.
    """
    output: Tensor = _TreeAttention.apply(query, key, value, segments, scaling)  # type: ignore[no-untyped-call]
    return output


class _TreeAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one number a query for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Sequence[Segment],
        scaling: float | None,
    ) -> Tensor:
        queries, keys, values = _group_heads(query, key, value)
        output = _make_like(queries, segments)
        exact = torch.promote_types(queries.dtype, torch.float32)
        normalizers = queries.new_empty(queries.shape[:-1], dtype=exact)
        for segment in segments:
            # The queries that attend to the segment's keys, and those keys.
            rows, own = slice(segment.start, segment.subtree_end), slice(segment.start, segment.end)
            part, part_normalizers = _forward_kernel(
                queries[:, :, rows], keys[:, :, own], values[:, :, own], 0.0, True, scale=scaling
            )
            if segment.is_root:
                output[:, :, rows] = part
                normalizers[:, :, rows] = part_normalizers
            else:
                _join(output[:, :, rows], normalizers[:, :, rows], part, part_normalizers)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.segments, ctx.scaling = segments, scaling
        # [groups, group size, tokens, width] -> [tokens, heads, width]
        return output.permute(2, 0, 1, 3).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalizers = ctx.saved_tensors
        queries, keys, values = _group_heads(query, key, value)
        grad = _unflatten(grad_output.contiguous(), 1, queries.shape[:2]).permute(1, 2, 0, 3)
        grad_query = _make_like(queries, ctx.segments)
        grad_key = key.new_empty(key.transpose(0, 1).shape).transpose(0, 1)
        grad_value = torch.empty_like(grad_key)
        for segment in ctx.segments:
            # The queries that attend to the segment's keys, and those keys.
            rows, own = slice(segment.start, segment.subtree_end), slice(segment.start, segment.end)
            query_part, key_part, value_part = _backward_kernel(
                grad[:, :, rows],
                queries[:, :, rows],
                keys[:, :, own],
                values[:, :, own],
                output[:, :, rows],
                normalizers[:, :, rows].contiguous(),
                0.0,
                True,
                scale=ctx.scaling,
            )
            if segment.is_root:
                grad_query[:, :, rows] = query_part
            else:
                grad_query[:, :, rows] += query_part
            grad_key[:, own] = key_part.sum(1)
            grad_value[:, own] = value_part.sum(1)
        return grad_query.flatten(0, 1).to(query.dtype), grad_key, grad_value, None, None


def _group_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [key heads, queries per key head, tokens, width]; keys and values are repeated
    without a copy."""
    groups, size = key.shape[0], query.shape[0] // key.shape[0]
    return (
        _unflatten(query, 0, (groups, size)),
        key[:, None].expand(-1, size, -1, -1),
        value[:, None].expand(-1, size, -1, -1),
    )


def _unflatten(tensor: Tensor, dimension: int, sizes: Sequence[int]) -> Tensor:
    parted: Tensor = tensor.unflatten(dimension, sizes)  # type: ignore[no-untyped-call]
    return parted


def _make_like(queries: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Room for as much as ``queries``, in float32 where a token's part is added up from several
    segments: it is rounded once, however many these are.

    In memory all heads of a token lie together, as the model's next layer wants them.
    """
    groups, size, num_tokens, width = queries.shape
    dtype = queries.dtype
    if dtype in _HALF_PRECISION and not all(segment.is_root for segment in segments):
        dtype = torch.float32
    return queries.new_empty(num_tokens, groups, size, width, dtype=dtype).permute(1, 2, 0, 3)


def _join(output: Tensor, normalizers: Tensor, part: Tensor, part_normalizers: Tensor) -> None:
    """Adds the attention to further keys to an output, both with the log of their sums of
    exponentials."""
    joined = torch.logaddexp(normalizers, part_normalizers)
    output.mul_((normalizers - joined).exp_()[..., None])
    output.addcmul_(part.to(output.dtype), (part_normalizers - joined).exp_()[..., None])
    normalizers.copy_(joined)


def attend_in_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    scaling: float | None,
    sliding_window: int,
) -> Tensor:
    """The same within a window: each token attends to the ``sliding_window`` - 1 before it and
    itself. Tensors are [1, heads, tokens, width]; the output is as in the others.

    Blocks of a segment's queries attend to the blocks of their path that the window reaches.
    """
    blocks, before = _cut_into_blocks(segments)
    sizes = [block.end - block.start for block in blocks]
    keys, values = torch.split(key, sizes, dim=2), torch.split(value, sizes, dim=2)
    parts = []
    for number, queries in enumerate(torch.split(query, sizes, dim=2)):
        first = blocks[number].position - sliding_window + 1
        seen, current = [number], before[number]
        while current is not None and blocks[current].position + sizes[current] > first:
            seen.append(current)
            current = before[current]
        seen.reverse()
        positions = torch.cat([_find_positions(blocks[one], query.device) for one in seen])
        distance = _find_positions(blocks[number], query.device)[:, None] - positions
        parts.append(
            scaled_dot_product_attention(
                queries,
                torch.cat([keys[one] for one in seen], dim=2),
                torch.cat([values[one] for one in seen], dim=2),
                attn_mask=(distance >= 0) & (distance < sliding_window),
                scale=scaling,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


def _cut_into_blocks(
    segments: Sequence[Segment],
) -> tuple[list[Segment], list[int | None]]:
    """Segments of few tokens, and for each the number of the one before it on its path."""
    blocks: list[Segment] = []
    before: list[int | None] = []
    open_blocks: list[int] = []
    for segment in segments:
        for start in range(segment.start, segment.end, _WINDOW_BLOCK):
            end = min(start + _WINDOW_BLOCK, segment.end)
            position = segment.position + start - segment.start
            while open_blocks and blocks[open_blocks[-1]].position >= position:
                open_blocks.pop()
            before.append(open_blocks[-1] if open_blocks else None)
            open_blocks.append(len(blocks))
            blocks.append(Segment(start, end, segment.subtree_end, position))
    return blocks, before


def _find_positions(segment: Segment, device: torch.device) -> Tensor:
    length = segment.end - segment.start
    return torch.arange(segment.position, segment.position + length, device=device)


Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def build_seen(
    segments: Sequence[Segment], sliding_window: int | None, device: torch.device
) -> Seen:
    """Whether query node q attends to key node k, as flex attention asks: f(row, head, q, k)."""
    lengths = torch.tensor([one.end - one.start for one in segments])
    nodes = torch.arange(int(lengths.sum()))
    subtree_ends = torch.tensor([one.subtree_end for one in segments]).repeat_interleave(lengths)
    offsets = torch.tensor([one.position - one.start for one in segments])
    positions = (nodes + offsets.repeat_interleave(lengths)).to(device)
    subtree_ends = subtree_ends.to(device)

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_above = (key <= query) & (query < subtree_ends[key])
        if sliding_window is None:
            return is_above
        return is_above & (positions[query] - positions[key] < sliding_window)

    return seen


def build_block_mask(
    segments: Sequence[Segment], sliding_window: int | None, device: torch.device
) -> Any:
    """The block mask of a tree, for all layers with this window."""
    from torch.nn.attention.flex_attention import create_block_mask

    count = segments[-1].end
    seen = build_seen(segments, sliding_window, device)
    return _compile(create_block_mask)(seen, None, None, count, count, device=device)


def attend_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, block_mask: Any, scaling: float | None
) -> Tensor:
    """The attention output [tokens, heads, width] on CUDA; arguments [1, heads, tokens, width]."""
    from torch.nn.attention.flex_attention import flex_attention

    is_grouped = key.shape[1] != query.shape[1]
    output: Tensor = _compile(flex_attention)(
        query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=is_grouped
    )
    return output[0].transpose(0, 1)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled once for all shapes: uncompiled flex attention computes the scores of all pairs."""
    return torch.compile(function, dynamic=True)
