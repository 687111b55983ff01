"""The tokens that end a completion."""

from __future__ import annotations

from typing import Any


def find_end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a completion by the word of the model and of its tokenizer.

    vLLM goes by the same two, SGLang by the model's.

    Args:
        model: a transformers model.
        tokenizer: its tokenizer.
    """
    configured = model.generation_config.eos_token_id if model.generation_config else None
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
