"""A byte-level BPE tokenizer of Qwen2's kind, learned from the texts of a dataset."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib import resources

from tokenizers import AddedToken, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

#: Removed by ``decode(skip_special_tokens=True)``.
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
#: One token each, but text that a parser of tool calls must see.
TAG_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
)


def load_chat_template() -> str:
    """The ChatML template with tools in hermes format that new models get."""
    return resources.files("agentrl_cli.models").joinpath("chatml.jinja").read_text("utf-8")


def build_untrained_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the chat template and no tokens: it renders texts to learn from."""
    tokenizer = Qwen2Tokenizer()
    tokenizer.chat_template = load_chat_template()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with at most ``vocab_size`` tokens, and the ChatML template.

    Qwen2's own class splits the text (digits singly): transformers rebuilds the tokenizer of
    every model of ``model_type: qwen2`` with it on loading, and ids learned with another
    split would change between saving and loading.
    """
    tags = (*SPECIAL_TOKENS, *TAG_TOKENS)
    trainee = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trainee.train_from_iterator((_strip_tags(text) for text in texts), trainer)
    learned = json.loads(trainee.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
    )
    tokenizer.add_tokens(
        [AddedToken(tag, special=True, normalized=False) for tag in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAG_TOKENS])
    tokenizer.chat_template = load_chat_template()
    return tokenizer


def _strip_tags(text: str) -> str:
    for tag in (*SPECIAL_TOKENS, *TAG_TOKENS):
        text = text.replace(tag, "\n")
    return text
