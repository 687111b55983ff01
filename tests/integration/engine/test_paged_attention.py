"""Paged attention against plain causal attention, one request at a time."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from agentrl_cli.engine.embedded.paged_attention import build_layout, paged_attention

PAGE = 4


class _Pages:
    """A cache of one layer: what paged_attention asks of the library's allocator."""

    index = 0

    def __init__(self, num_pages: int, num_heads: int, head_dim: int) -> None:
        # Stale numbers everywhere but in page 0: unused ends of pages must not matter.
        self.keys = torch.full((num_pages, PAGE, num_heads, head_dim), 1e3)
        self.values = torch.full((num_pages, PAGE, num_heads, head_dim), -1e3)
        self.keys[0] = self.values[0] = 0.0

    def update(self, keys, values, layer, read_index, write_index):
        assert read_index.numel() == 0
        self.keys.flatten(0, 1)[write_index] = keys
        self.values.flatten(0, 1)[write_index] = values
        return keys, values

    def get_cache_for_block_table(self, layer):
        return self.keys, self.values


def _attend_plainly(query, keys, values):
    """[queries, heads, dim] of the last queries over all keys, heads in groups, float64."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, dim=1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / math.sqrt(query.shape[2])
    hidden = torch.ones(scores.shape[1:]).triu(1 + len(keys) - len(query)).bool()
    chances = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", chances, values)


@pytest.mark.parametrize(
    ("query_lengths", "key_lengths"),
    [
        ([1], [1]),
        ([5], [5]),
        ([1, 1, 1], [3, 9, 4]),
        ([1, 6, 1, 3, 1], [7, 6, 12, 11, 1]),  # decoding, fresh, continued and one-token prompts
        ([2, 4], [10, 4]),
    ],
)
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
def test_each_request_attends_to_its_own_past_alone(query_lengths, key_lengths, num_key_heads):
    torch.manual_seed(0)
    num_heads, dim = 4, 8
    allocator = _Pages(40, num_key_heads, dim)
    free = torch.randperm(39).add(1).tolist()
    # One page more than needed now and then, as after an allocation ahead of use.
    tables = [[free.pop() for _ in range(n // PAGE + 1)] for n in key_lengths]
    keys = [torch.randn(n, num_key_heads, dim) for n in key_lengths]
    values = [torch.randn(n, num_key_heads, dim) for n in key_lengths]
    queries = [torch.randn(n, num_heads, dim) for n in query_lengths]
    places = [
        torch.tensor([table[i // PAGE] * PAGE + i % PAGE for i in range(n)])
        for table, n in zip(tables, key_lengths, strict=True)
    ]
    new = list(zip(places, keys, values, query_lengths, strict=True))
    for place, key, value, num_queries in new:  # the past is in the cache already
        past = len(key) - num_queries
        allocator.update(key[:past], value[:past], 0, torch.empty(0), place[:past])
    pack = lambda parts: torch.cat(parts).transpose(0, 1).unsqueeze(0)  # noqa: E731
    got, _ = paged_attention(
        SimpleNamespace(layer_idx=0),
        pack(queries),
        pack([key[-n:] for _, key, _, n in new]),
        pack([value[-n:] for _, _, value, n in new]),
        None,
        scaling=1 / math.sqrt(dim),
        cache=SimpleNamespace(layer_to_allocator={0: allocator}),
        step_layout=build_layout(
            query_lengths, key_lengths, tables, page_size=PAGE, device=torch.device("cpu")
        ),
        write_index=[torch.cat([place[-n:] for place, _, _, n in new])],
    )
    expected = [_attend_plainly(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(got[0].double(), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_outside_of_the_engine_the_attention_says_so():
    part = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="give the engine its own copy of the model"):
        paged_attention(SimpleNamespace(layer_idx=0), part, part, part, None)
