from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.errors import ModelError
from agentrl_cli.models.pretrained import check_tokenizer, load_tokenizer_of


def write_model(folder: Path, vocab_size: int, **more: Any) -> str:
    config = {"model_type": "qwen2", "vocab_size": vocab_size, **more}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_vocabulary_that_is_large_enough_passes(chat_tokenizer: Any, tmp_path: Path) -> None:
    check_tokenizer(chat_tokenizer, write_model(tmp_path, len(chat_tokenizer)))
    check_tokenizer(chat_tokenizer, write_model(tmp_path, len(chat_tokenizer) + 64))


def test_a_larger_tokenizer_is_refused_with_both_numbers(
    chat_tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error_info:
        check_tokenizer(chat_tokenizer, write_model(tmp_path, 100))
    text = str(error_info.value)
    found = re.search(r"makes ids up to (\d+), and", text)
    assert found is not None
    assert 100 <= int(found[1]) < len(chat_tokenizer)
    assert "a vocabulary of 100 (largest id 99)" in text
    assert "Type tokenizer_path=null" in text


def test_a_marker_that_nothing_makes_may_lie_beyond(chat_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    size = len(tokenizer)
    tokenizer.add_tokens(["<image_soft_token>"], special_tokens=True)
    folder = write_model(tmp_path, size)
    check_tokenizer(tokenizer, folder)
    tokenizer.eos_token = "<image_soft_token>"
    with pytest.raises(ModelError, match=f"makes ids up to {size}, and"):
        check_tokenizer(tokenizer, folder)


def test_a_template_that_makes_ids_beyond_is_refused(chat_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    size = len(tokenizer)
    tokenizer.add_tokens(["<turn>"], special_tokens=True)
    tokenizer.chat_template = "<turn>" + tokenizer.chat_template
    with pytest.raises(ModelError, match=f"makes ids up to {size}, and"):
        check_tokenizer(tokenizer, write_model(tmp_path, size))


def test_a_folder_without_a_model_is_named(chat_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"its config\.json cannot be loaded"):
        check_tokenizer(chat_tokenizer, str(tmp_path))


def test_the_models_own_tokenizer_is_the_default(chat_tokenizer: Any, tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "other"
    for folder in (model, other):
        folder.mkdir()
        chat_tokenizer.save_pretrained(folder)
    write_model(model, len(chat_tokenizer))
    assert len(load_tokenizer_of(str(model))) == len(chat_tokenizer)
    assert load_tokenizer_of(str(model), str(other)).name_or_path == str(other)
    write_model(model, 100)
    for tokenizer_path in (None, str(other)):
        with pytest.raises(ModelError, match="do not belong together"):
            load_tokenizer_of(str(model), tokenizer_path)
