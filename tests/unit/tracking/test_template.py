"""Token ids and texts are those of the tokenizer itself, whichever way they are asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agentrl_cli.tracking.template import ChatTemplate

TEXTS = [
    "",
    " ",
    "What is the weather in Paris?",
    "<|im_start|>user\nforty two<|im_end|>\n<|im_start|>assistant\n",
    "é\u0301 \U0001f600 \x00 <|im_end|",
    "<|im_end|><|im_end|>\n\n  two",
]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_the_tokenizers(tokenizer: Any, text: str) -> None:
    template = ChatTemplate(tokenizer)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert template.encode(text) == tuple(expected)
    decoded = tokenizer.decode(
        expected, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert template.decode_all(expected) == template.decode_all(tuple(expected)) == decoded


def test_a_tokenizer_left_cutting_or_padding_still_encodes_all(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    template = ChatTemplate(own)
    text = TEXTS[3]
    whole = template.encode(text)
    own([text, "a"], padding=True, truncation=True, max_length=4)
    assert own.backend_tokenizer.truncation is not None
    assert template.encode(text) == whole


def test_a_tokenizer_with_an_encode_of_its_own_is_asked_itself(tokenizer: Any) -> None:
    class Louder(type(tokenizer)):  # type: ignore[misc]
        def encode(self, text: Any, **options: Any) -> list[int]:
            return [*super().encode(text, **options), 0]

    own = copy.deepcopy(tokenizer)
    own.__class__ = Louder
    assert ChatTemplate(own).encode("Paris") == (*ChatTemplate(tokenizer).encode("Paris"), 0)
