"""Whether a tokenizer belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast

from agentrl_cli.errors import ModelError
from agentrl_cli.models.pretrained import load_tokenizer


def load_tokenizer_of(model_path: str, tokenizer_path: str | None = None) -> Any:
    """The tokenizer of a model, its own unless another is named, and one that fits it.

    Raises:
        ModelError: there is none, it cannot be used, or it belongs to another model.
    """
    tokenizer = load_tokenizer(tokenizer_path or model_path)
    # A folder without a model is refused, in better words, by who loads the model.
    if not Path(model_path).is_dir() or (Path(model_path) / "config.json").is_file():
        check_tokenizer(tokenizer, model_path)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, model_path: str) -> None:
    """Refuses a tokenizer that makes ids which the model has no embedding for.

    Added tokens that no text and no template makes may lie beyond the vocabulary: some
    text-only models keep the markers of images of their larger kin.

    Args:
        tokenizer: as loaded.
        model_path: folder or hub id of the model.

    Raises:
        ModelError: naming the first id too many and the size of the vocabulary.
    """
    try:
        model_config = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"{model_path}: its config.json cannot be loaded: {reason}") from error
    vocab_size = model_config.get_text_config().vocab_size
    largest = _find_largest_id(tokenizer)
    if vocab_size is not None and largest >= vocab_size:
        raise ModelError(
            f"{tokenizer.name_or_path}: its tokenizer makes ids up to {largest}, and the model "
            f"{model_path} has a vocabulary of {vocab_size} (largest id {vocab_size - 1}): they do "
            "not belong together. Type tokenizer_path=null for the model's own tokenizer, or "
            "model.path= with the model that this tokenizer was made for"
        )


def _find_largest_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The largest id that text, a turn of the chat template, or its end is made of."""
    added = set(tokenizer.get_added_vocab().values())
    ids = {index for index in tokenizer.get_vocab().values() if index not in added}
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    turn = tokenizer.apply_chat_template(messages, tokenize=False)
    ids.update(tokenizer.encode(str(turn), add_special_tokens=False))
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    return max(ids)
