"""Packed forward passes of whole models equal separate ones by the stock attention."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl_cli.errors import ModelError
from agentrl_cli.train.data.packing import Packing, build_micro_batch
from agentrl_cli.train.data.prefix_tree import build_prefix_tree, keep_apart, sort_sequences
from agentrl_cli.train.data.samples import build_scoring_sample
from agentrl_cli.train.model.output_head import compute_micro_batch_logprobs
from agentrl_cli.train.model.packed_attention import AttentionLayout, use_packed_attention

SEQUENCES = [
    [3, 4, 5, 6, 7, 8, 9],
    [10],
    [11, 12, 13],
    list(range(20, 60)),
    [*range(20, 50), *range(5)],
    [3, 4, 5, 9, 9],
    [11, 12, 13],
    [3, 4, 5, 9, 8, 7],
]

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def build(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.mark.parametrize("packing", ["plain", "prefix_tree"])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("qwen3", {}),
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
    ],
)
def test_hidden_states_and_gradients_equal(kind: str, changes: dict[str, object], packing: Packing):
    model = build(kind, **changes)
    separate = torch.cat(
        [model.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in SEQUENCES]
    )
    target = torch.randn(separate.shape)
    (separate * target).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    use_packed_attention(model)
    sequences = [torch.tensor(ids) for ids in SEQUENCES]
    is_shared = packing == "prefix_tree"
    found = sort_sequences(sequences) if is_shared else keep_apart(len(sequences))
    tree = build_prefix_tree(sequences, found)
    nodes = model.base_model(
        input_ids=tree.input_ids[None],
        position_ids=tree.position_ids[None],
        use_cache=False,
        layout=AttentionLayout(tree.segments),
    ).last_hidden_state[0]
    packed = nodes[torch.cat(tree.paths)]
    (packed * target).sum().backward()
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=1e-5)
    assert expected
    for name, parameter in model.named_parameters():
        if name in expected:
            largest = float(expected[name].abs().max())
            torch.testing.assert_close(
                parameter.grad, expected[name], atol=1e-5 * max(largest, 1.0), rtol=0.0
            )


@torch.no_grad()
def test_a_sequence_does_not_see_its_neighbours():
    model = build("qwen2")
    use_packed_attention(model)

    def score(first: list[int]) -> torch.Tensor:
        samples = [
            build_scoring_sample(ids, 1, temperature=1.0, top_p=1.0) for ids in (first, [9, 8, 7])
        ]
        batch = build_micro_batch(samples, torch.device("cpu"))
        return compute_micro_batch_logprobs(model, batch).logprobs

    # Three targets of the first, two of the second.
    assert len(score([1, 2, 3, 4])) == 5
    # Both stand before it: elsewhere another thread may add up in another order.
    assert torch.equal(score([1, 2, 3, 4])[3:], score([5, 6, 7, 8])[3:])


def test_capped_attention_scores_are_refused():
    model = build("gemma2", attn_logit_softcapping=20.0, final_logit_softcapping=None)
    use_packed_attention(model)
    with pytest.raises(ModelError, match="caps its attention scores"):
        model.base_model(torch.tensor([[1, 2, 3]]), use_cache=False)
