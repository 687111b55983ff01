"""Attention over the paged cache, one request at a time instead of all against all.

The library's own ``sdpa`` packs the requests of a step into one sequence and masks the
pairs that belong to different requests: work and mask grow with the square of the number
of requests. Here rows that decode form one padded batch, and each prefill runs alone;
nothing is computed that is thrown away save the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

PAGED_ATTENTION = "agentrl_paged"


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One request with several new tokens: where its queries and its keys lie."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int
    mask: torch.Tensor | None
    """bool, [queries, keys], True = attends; None: plainly causal, nothing cached before."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How the requests of one step lie in its packed tensors; made once for all layers."""

    read_index: torch.Tensor
    """Rows of the cache to read: the padded keys of the decoding rows, then each prefill's.
    Empty: nothing is cached yet, the new keys are all there is."""
    decode_rows: torch.Tensor
    """Positions of the decoding rows among the queries."""
    decode_length: int
    """Keys per decoding row, padding included."""
    decode_mask: torch.Tensor | None
    """bool, [rows, 1, 1, decode_length], True = attends."""
    prefills: tuple[PrefillSpan, ...]


def build_layout(
    query_lengths: list[int], key_lengths: list[int], read_index: torch.Tensor
) -> StepLayout:
    """The layout of a step whose requests have these numbers of new and of total tokens.

    ``read_index`` holds the cache rows of all requests one after another, or nothing when
    no request has cached tokens.
    """
    device = read_index.device
    has_reads = read_index.numel() > 0
    rows, lengths, starts = [], [], []
    spans: list[tuple[int, int, int, int]] = []
    query_start = key_start = 0
    for num_queries, num_keys in zip(query_lengths, key_lengths, strict=True):
        if num_queries == 1 and has_reads:
            rows.append(query_start)
            lengths.append(num_keys)
            starts.append(key_start)
        else:
            spans.append((query_start, query_start + num_queries, key_start, key_start + num_keys))
        query_start += num_queries
        key_start += num_keys
    decode_length = max(lengths, default=0)
    parts, mask = [], None
    if rows:
        offsets = torch.arange(decode_length, device=device)
        present = offsets < torch.tensor(lengths, device=device).unsqueeze(1)
        places = torch.tensor(starts, device=device).unsqueeze(1) + offsets
        # Row 0 of the cache is the library's read trash: zeros, never written.
        padded = read_index[places.clamp(max=key_start - 1)].masked_fill(~present, 0)
        parts.append(padded.flatten())
        if min(lengths) < decode_length:
            mask = present.view(len(rows), 1, 1, decode_length)
    position = len(rows) * decode_length
    prefills = []
    for start, end, first_key, last_key in spans:
        num_queries, num_keys = end - start, last_key - first_key
        if has_reads:
            parts.append(read_index[first_key:last_key])
            first_key, last_key = position, position + num_keys
            position += num_keys
        prefills.append(
            PrefillSpan(
                start, end, first_key, last_key, _causal_mask(num_queries, num_keys, device)
            )
        )
    return StepLayout(
        read_index=torch.cat(parts) if has_reads else read_index,
        decode_rows=torch.tensor(rows, device=device, dtype=torch.int64),
        decode_length=decode_length,
        decode_mask=mask,
        prefills=tuple(prefills),
    )


def _causal_mask(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor | None:
    if num_queries == num_keys:
        return None
    full = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    return full.tril(diagonal=num_keys - num_queries)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - always None: the layout says it all
    *,
    scaling: float | None = None,
    cache: Any = None,
    step_layout: StepLayout | None = None,
    write_index: list[torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output, shape [1, queries, heads, head_dim], after writing the new keys.

    ``query`` is [1, heads, queries, head_dim], ``key`` and ``value`` [1, key_value_heads,
    queries, head_dim]: the packed new tokens of all requests of the step.
    """
    if cache is None or step_layout is None or write_index is None:
        raise RuntimeError(
            f"the attention {PAGED_ATTENTION!r} works inside the embedded engine alone: "
            "give the engine its own copy of the model"
        )
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise RuntimeError("soft-capped attention and attention sinks are not supported")
    allocator = cache.layer_to_allocator[module.layer_idx]
    keys, values = allocator.update(
        key.squeeze(0).transpose(0, 1),
        value.squeeze(0).transpose(0, 1),
        module.layer_idx,
        step_layout.read_index,
        write_index[allocator.index],
    )
    queries = query.squeeze(0).transpose(0, 1)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if step_layout.decode_length:
        rows = step_layout.decode_rows
        num_keys = len(rows) * step_layout.decode_length
        decoded = _attend_decoding(
            queries[rows], keys[:num_keys], values[:num_keys], step_layout, scaling
        )
        output.index_copy_(0, rows, decoded)
    for span in step_layout.prefills:
        own = functional.scaled_dot_product_attention(
            queries[span.query_start : span.query_end].transpose(0, 1).unsqueeze(0),
            keys[span.key_start : span.key_end].transpose(0, 1).unsqueeze(0),
            values[span.key_start : span.key_end].transpose(0, 1).unsqueeze(0),
            attn_mask=span.mask,
            is_causal=span.mask is None,
            scale=scaling,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        output[span.query_start : span.query_end] = own.squeeze(0).transpose(0, 1)
    return output.unsqueeze(0), None


def _attend_decoding(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layout: StepLayout,
    scaling: float | None,
) -> torch.Tensor:
    """Output of one query per row, [rows, heads, head_dim], over padded keys."""
    num_rows, num_heads, head_dim = queries.shape
    shape = (num_rows, layout.decode_length, keys.shape[1], head_dim)
    # The heads that share keys stand where queries of one sequence would: all of them
    # attend to the same keys, so nothing has to be repeated.
    grouped = queries.view(num_rows, keys.shape[1], num_heads // keys.shape[1], head_dim)
    out = functional.scaled_dot_product_attention(
        grouped,
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        attn_mask=layout.decode_mask,
        scale=scaling,
    )
    return out.reshape(num_rows, num_heads, head_dim)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
