"""A model folder, as a user has one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, chat_tokenizer: Any) -> Path:
    """A tiny random model with the tokenizer of the unit tests, on disk."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=len(chat_tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=chat_tokenizer.eos_token_id,
        pad_token_id=chat_tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder
