"""Packed attention equals attention of each sequence alone, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from agentrl_cli.train.attention import packed_attention, packing_arguments

LENGTHS = [5, 1, 9, 2]
MODULE = nn.Module()


def draw(heads: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, heads, sum(LENGTHS), 16, generator=generator)
    return values.to(device, dtype).requires_grad_()


def plain_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Softmax attention as in the textbook, one sequence and one head at a time."""
    group = query.shape[1] // key.shape[1]
    rows, start = [], 0
    for length in LENGTHS:
        stop = start + length
        heads = []
        for head in range(query.shape[1]):
            q, k = query[0, head, start:stop], key[0, head // group, start:stop]
            distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
            seen = (distance >= 0) & (distance < (window or length))
            scores = (q @ k.T / 4.0).masked_fill(~seen, -torch.inf)
            heads.append(scores.softmax(-1) @ value[0, head // group, start:stop])
        rows.append(torch.stack(heads, dim=1))
        start = stop
    return torch.cat(rows)[None]


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_packed_equals_separate_with_gradients(key_heads: int, window: int | None):
    query, key, value = draw(4, 0), draw(key_heads, 1), draw(key_heads, 2)
    weights = draw(4, 3).detach().transpose(1, 2)
    results = []
    for attend in ("packed", "plain"):
        if attend == "packed":
            output, _ = packed_attention(
                MODULE, query, key, value, None, scaling=0.25, sliding_window=window,
                **packing_arguments(LENGTHS, torch.device("cpu")),
            )  # fmt: skip
        else:
            output = plain_attention(query, key, value, window)
        gradients = torch.autograd.grad((output * weights).sum(), (query, key, value))
        results.append((output, *gradients))
    for packed, plain in zip(*results, strict=True):
        torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0.0)


def test_one_sequence_needs_no_lengths():
    query, key, value = draw(4, 0), draw(2, 1), draw(2, 2)
    alone, _ = packed_attention(MODULE, query, key, value, None)
    named, _ = packed_attention(MODULE, query, key, value, None, sequence_lengths=[sum(LENGTHS)])
    assert torch.equal(alone, named)


def test_a_mask_is_refused_and_not_ignored():
    query = draw(4, 0)
    with pytest.raises(ValueError, match="no attention_mask"):
        packed_attention(MODULE, query, query, query, torch.ones(1, 1, 17, 17))


def test_packing_arguments_by_hand():
    arguments = packing_arguments([3, 1, 2], torch.device("cpu"))
    assert arguments["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert arguments["max_length_q"] == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("window", [None, 3])
def test_the_cuda_kernel_equals_separate_calls(window: int | None):
    tensors = [draw(4, 0, "cuda", torch.bfloat16), draw(2, 1, "cuda", torch.bfloat16),
               draw(2, 2, "cuda", torch.bfloat16)]  # fmt: skip
    output, _ = packed_attention(
        MODULE, *tensors, None, scaling=0.25, sliding_window=window,
        **packing_arguments(LENGTHS, torch.device("cuda")),
    )  # fmt: skip
    expected = plain_attention(*(t.detach().float().cpu() for t in tensors), window)
    torch.testing.assert_close(output.float().cpu(), expected, atol=3e-2, rtol=0.0)
