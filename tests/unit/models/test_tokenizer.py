from __future__ import annotations

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentrl_cli.models.tokenizer_training import TAG_TOKENS, train_tokenizer

TEXTS = ["A baker has 47 rolls and bakes 38 more.", "How many rolls are there?"] * 20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(TEXTS, vocab_size=400)


@pytest.mark.parametrize(
    "text",
    [
        "A baker has 4738 rolls",
        "  two  spaces\n\n\nand lines\t",
        "héllo 日本語 🙂 unseen",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>\n',
        "it's 3.14",
    ],
)
def test_round_trip_also_after_saving(tokenizer, tmp_path, text):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text)["input_ids"]
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode(ids) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.eos_token == "<|im_end|>"
    assert loaded.eos_token_id == tokenizer.eos_token_id != loaded.pad_token_id


def test_digits_and_tags_are_one_token_and_survive_skipping_special_ones(tokenizer):
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    for tag in TAG_TOKENS:
        assert len(tokenizer(tag)["input_ids"]) == 1
    ids = tokenizer("<|im_start|>x<tool_call>y<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x<tool_call>y"


def test_the_vocabulary_is_limited_learned_and_the_same_again(tokenizer):
    assert len(tokenizer) <= 400
    assert len(tokenizer(" rolls")["input_ids"]) == 1
    again = train_tokenizer(TEXTS, vocab_size=400)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
