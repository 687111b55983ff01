"""Packed attention equals the textbook's over each token's ancestors, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from agentrl_cli.errors import ModelError
from agentrl_cli.train.data.prefix_tree import build_prefix_tree, keep_apart, sort_sequences
from agentrl_cli.train.model.packed_attention import (
    AttentionLayout,
    packed_attention,
    use_packed_attention,
)
from agentrl_cli.train.model.tree_attention import build_seen

MODULE = nn.Module()

#: Two branches of two, one token alone, one long branch; 27 different tokens.
SEQUENCES = [
    [1, 2, 3, 4, 5, 6, 7],
    [1, 2, 3, 4, 8],
    [1, 2, 3, 9, 9, 9, 9, 9],
    [5],
    [6, *range(10, 20)],
    [6, *range(10, 15)],
]


def build_layout(packing: str, sequences: list[list[int]] = SEQUENCES) -> AttentionLayout:
    tensors = [torch.tensor(ids) for ids in sequences]
    is_shared = packing == "prefix_tree"
    found = sort_sequences(tensors) if is_shared else keep_apart(len(tensors))
    return AttentionLayout(build_prefix_tree(tensors, found).segments)


def draw(
    layout: AttentionLayout,
    heads: int,
    seed: int,
    *,
    width: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, heads, layout.num_tokens, width, generator=generator)
    return values.to(device, dtype).requires_grad_()


def find_seen(layout: AttentionLayout, window: int | None) -> Tensor:
    """Which node sees which, [tokens, tokens]."""
    seen = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    positions = torch.zeros(layout.num_tokens, dtype=torch.long)
    for one in layout.segments:
        positions[one.start : one.end] = one.position + torch.arange(one.end - one.start)
        for node in range(one.start, one.subtree_end):
            seen[node, one.start : min(node + 1, one.end)] = True
    distance = positions[:, None] - positions[None, :]
    return seen & (distance < (window or layout.num_tokens))


def plain_attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Softmax attention as in the textbook, one head at a time."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[0, head] @ key[0, head // group].T / 4.0
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        heads.append(weights @ value[0, head // group])
    return torch.stack(heads, dim=1)[None]


def check_textbook(
    layout: AttentionLayout, heads: int, key_heads: int, window: int | None, *, width: int = 16
) -> None:
    """The output, and the gradients of queries, keys and values."""
    tensors = (
        draw(layout, heads, 0),
        draw(layout, key_heads, 1),
        draw(layout, key_heads, 2, width=width),
    )
    packed, _ = packed_attention(
        MODULE, *tensors, None, scaling=0.25, sliding_window=window, layout=layout
    )
    plain = plain_attention(*tensors, find_seen(layout, window))
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0.0)
    weights = draw(layout, heads, 3, width=width).detach().transpose(1, 2)
    for mine, expected in zip(
        torch.autograd.grad((packed * weights).sum(), tensors),
        torch.autograd.grad((plain * weights).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("packing", ["plain", "prefix_tree"])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_equals_the_textbook_with_gradients(packing: str, key_heads: int, window: int | None):
    check_textbook(build_layout(packing), 4, key_heads, window)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 600])
def test_long_segments_are_right_too(window: int | None):
    """More queries and keys than one block of the kernel, in the prompt and in the branches,
    and more than one block of a window."""
    branches = [[1] * 700 + [n] * (100 + 300 * n) for n in (2, 3, 4)]
    check_textbook(build_layout("prefix_tree", branches), 2, 1, window)


def test_values_may_be_narrower_than_keys():
    check_textbook(build_layout("prefix_tree"), 2, 2, None, width=8)


def test_bfloat16_rounds_a_joined_output_once():
    """Deep branches: every token is joined from many segments."""
    layout = build_layout("prefix_tree", [[1] * n + [2] * 3 for n in range(1, 40)])
    tensors = [draw(layout, 2, seed, dtype=torch.bfloat16) for seed in range(3)]
    packed, _ = packed_attention(MODULE, *tensors, None, scaling=0.25, layout=layout)
    exact = plain_attention(*(t.detach().double() for t in tensors), find_seen(layout, None))
    assert packed.dtype == torch.bfloat16
    # Half of the last of bfloat16's 8 bits, and as much for the kernel's own products.
    torch.testing.assert_close(packed.double(), exact, atol=4e-3, rtol=2**-7)


def test_bfloat16_gradients_of_many_segments_are_nearly_as_exact_as_of_one():
    """A query's gradient is added up over the segments of its path."""
    tree = build_layout("prefix_tree", [[1] * n + [2] * 3 for n in range(1, 40)])
    line = build_layout("plain", [[1] * tree.num_tokens])
    errors = []
    for layout in (tree, line):
        tensors = [draw(layout, 2, seed, dtype=torch.bfloat16) for seed in range(3)]
        packed, _ = packed_attention(MODULE, *tensors, None, scaling=0.25, layout=layout)
        copies = [t.detach().double().requires_grad_() for t in tensors]
        exact = plain_attention(*copies, find_seen(layout, None))
        weights = draw(layout, 2, 3).detach().transpose(1, 2)
        mine = torch.autograd.grad((packed.float() * weights).sum(), tensors)
        right = torch.autograd.grad((exact * weights).sum(), copies)
        errors.append(
            [float((m.double() - r).norm() / r.norm()) for m, r in zip(mine, right, strict=True)]
        )
    # Each part is rounded by the kernel; added up in bfloat16, the queries' would be at 1.9.
    assert all(own < 1.4 * plain for own, plain in zip(*errors, strict=True)), errors


def test_without_a_layout_every_row_is_a_sequence():
    layout = build_layout("plain", [[1] * 9])
    query, key, value = draw(layout, 4, 0), draw(layout, 2, 1), draw(layout, 2, 2)
    both = [torch.cat([one, one.flip(2)]) for one in (query, key, value)]
    rows, _ = packed_attention(MODULE, *both, None)
    alone, _ = packed_attention(MODULE, query, key, value, None, layout=layout)
    turned, _ = packed_attention(MODULE, *(one[1:] for one in both), None, layout=layout)
    assert torch.equal(rows, torch.cat([alone, turned]))


def test_a_mask_and_keys_of_earlier_calls_are_refused_and_not_ignored():
    keys = draw(build_layout("plain"), 4, 0)
    with pytest.raises(ValueError, match="no attention_mask"):
        packed_attention(MODULE, keys, keys, keys, torch.ones(1, 1, 17, 17))
    with pytest.raises(ValueError, match="no cache"):
        packed_attention(MODULE, keys[:, :, -1:], keys, keys, None)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (
            "qwen3_next",
            {
                **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
                **dict.fromkeys(("num_experts", "num_experts_per_tok", "num_key_value_heads"), 1),
                **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 1),
                **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
                "layer_types": ["linear_attention", "full_attention"],
            },
            "linear_attention",
        ),
        # The older name of layer_types.
        (
            "recurrent_gemma",
            {"lru_width": 16, "block_types": ["recurrent", "attention"]},
            "attention, recurrent",
        ),
    ],
)
def test_recurrent_layers_are_refused(kind: str, settings: dict[str, Any], said: str):
    """Their state would flow from one sample of a row into the next."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        **settings,
    )
    with pytest.raises(ModelError, match=f"layers of type {said}"):
        use_packed_attention(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("packing", ["plain", "prefix_tree"])
@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_of_flex_attention_by_hand(packing: str, window: int | None):
    layout = build_layout(packing)
    seen = build_seen(layout.segments, window, torch.device("cpu"))
    nodes = torch.arange(layout.num_tokens)
    nothing = torch.zeros(())
    grid = seen(nothing, nothing, nodes[:, None], nodes[None, :])
    assert torch.equal(grid, find_seen(layout, window))
    # And in the form in which torch asks for it.
    block_mask = create_block_mask(seen, None, None, len(nodes), len(nodes), device="cpu")
    assert block_mask.mask_mod is seen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packing", ["plain", "prefix_tree"])
@pytest.mark.parametrize("window", [None, 3])
def test_cuda_equals_the_textbook(packing: str, window: int | None, dtype: torch.dtype):
    layout = build_layout(packing)
    tensors = [draw(layout, heads, heads, device="cuda", dtype=dtype) for heads in (4, 2, 2)]
    output, _ = packed_attention(
        MODULE, *tensors, None, scaling=0.25, sliding_window=window, layout=layout
    )
    copies = [t.detach().float().cpu().requires_grad_() for t in tensors]
    expected = plain_attention(*copies, find_seen(layout, window))
    torch.testing.assert_close(output.float().cpu(), expected, atol=3e-2, rtol=0.0)
    for mine, right in zip(
        torch.autograd.grad(output.float().square().sum(), tensors),
        torch.autograd.grad(expected.square().sum(), copies),
        strict=True,
    ):
        torch.testing.assert_close(mine.float().cpu(), right, atol=1e-1, rtol=3e-2)
