"""Attention over the paged cache, one request at a time instead of all against all.

The library's own ``sdpa`` packs the requests of a step into one sequence and masks the
pairs that belong to different requests: work and mask grow with the square of the number
of requests, and every cached token is an entry of a Python list at every step. Here rows
that decode form one padded batch over whole pages, and each prefill runs alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from transformers import AttentionInterface

PAGED_ATTENTION = "agentrl_paged"


class PrefillSpan(NamedTuple):
    """One request with several new tokens."""

    queries: slice
    num_keys: int
    pages: torch.Tensor
    """Cache pages that hold its keys."""
    mask: torch.Tensor | None
    """bool, [queries, keys], True = attends; None: plainly causal, for its new keys are all."""


@dataclass(frozen=True, slots=True)
class StepLayout:
    """How the requests of one step lie in its packed tensors; made once for all layers."""

    decode_rows: torch.Tensor
    """Positions of the requests with one new token among the queries."""
    decode_pages: torch.Tensor
    """Their cache pages, one row's after another's, each padded to the longest."""
    decode_mask: torch.Tensor
    """bool, [rows, 1, 1, keys], True = attends; keys fill whole pages."""
    prefills: tuple[PrefillSpan, ...]


def build_layout(
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    pages: Sequence[Sequence[int]],
    *,
    page_size: int,
    device: torch.device,
) -> StepLayout:
    """The layout of a step whose requests have these numbers of new and of total tokens.

    ``pages`` holds the cache pages of every request, in the order of their tokens; there
    may be more than its tokens need.
    """
    rows, lengths, row_pages, prefills = [], [], [], []
    start = 0
    for num_queries, num_keys, own in zip(query_lengths, key_lengths, pages, strict=True):
        used = own[: -(-num_keys // page_size)]
        if num_queries == 1:
            rows.append(start)
            lengths.append(num_keys)
            row_pages.append(used)
        else:
            mask = None
            if num_queries < num_keys:
                full = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
                mask = full.tril(diagonal=num_keys - num_queries)
            queries = slice(start, start + num_queries)
            prefills.append(PrefillSpan(queries, num_keys, torch.tensor(used, device=device), mask))
        start += num_queries
    longest = max(map(len, row_pages), default=0)
    # Page 0 is the library's read trash: zeros, never written.
    padded = [[*used, *[0] * (longest - len(used))] for used in row_pages]
    places = torch.arange(longest * page_size, device=device)
    mask = places < torch.tensor(lengths, device=device).unsqueeze(1)
    return StepLayout(
        decode_rows=torch.tensor(rows, device=device, dtype=torch.int64),
        decode_pages=torch.tensor(padded, device=device, dtype=torch.int64).flatten(),
        decode_mask=mask.view(len(rows), 1, 1, longest * page_size),
        prefills=tuple(prefills),
    )


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
    queries, keys, values = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
    own_writes = write_index[allocator.index]
    # Nothing to read here (the empty index): whole pages are read below.
    allocator.update(keys, values, module.layer_idx, own_writes[:0], own_writes)
    key_pages, value_pages = allocator.get_cache_for_block_table(module.layer_idx)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if len(step_layout.decode_rows):
        decoded = _attend_decoding(
            queries[step_layout.decode_rows], key_pages, value_pages, step_layout, scaling
        )
        output.index_copy_(0, step_layout.decode_rows, decoded)
    for new, num_keys, span_pages, mask in step_layout.prefills:
        all_keys, all_values = (
            part.index_select(0, span_pages).flatten(0, 1)[:num_keys]
            for part in (key_pages, value_pages)
        )
        output[new] = (
            functional.scaled_dot_product_attention(
                queries[new].transpose(0, 1).unsqueeze(0),
                all_keys.transpose(0, 1).unsqueeze(0),
                all_values.transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            .squeeze(0)
            .transpose(0, 1)
        )
    return output.unsqueeze(0), None


def _attend_decoding(
    queries: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    layout: StepLayout,
    scaling: float | None,
) -> torch.Tensor:
    """Output of one query per row, [rows, heads, head_dim], over padded pages."""
    num_rows, num_heads, head_dim = queries.shape
    num_key_heads = key_pages.shape[2]
    shape = (num_rows, layout.decode_mask.shape[-1], num_key_heads, head_dim)
    # The heads that share keys stand where queries of one sequence would: all of them
    # attend to the same keys, so nothing has to be repeated.
    grouped = queries.reshape(num_rows, num_key_heads, num_heads // num_key_heads, head_dim)
    attended = functional.scaled_dot_product_attention(
        grouped,
        key_pages.index_select(0, layout.decode_pages).view(shape).transpose(1, 2),
        value_pages.index_select(0, layout.decode_pages).view(shape).transpose(1, 2),
        attn_mask=layout.decode_mask,
        scale=scaling,
    )
    return attended.reshape(num_rows, num_heads, head_dim)


AttentionInterface.register(PAGED_ATTENTION, paged_attention)
