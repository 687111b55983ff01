"""A small random Qwen2, for the benchmarks that sample."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config


def build_model(hidden_size: int, num_layers: int, *, tied: bool = True) -> PreTrainedModel:
    """A float32 model with 512 tokens of vocabulary and no end token; the same every time."""
    config = Qwen2Config(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()
