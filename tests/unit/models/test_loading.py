from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM

from agentrl_cli.errors import ModelError
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.builtin_models import resolve_model_folder
from agentrl_cli.models.model_files import check_tokenizer, load_tokenizer, load_tokenizer_of
from agentrl_cli.models.pretrained import check_weight_files, load_model


@pytest.fixture
def folder(tmp_path, chat_tokenizer, build_qwen2) -> Path:
    build_qwen2(chat_tokenizer, hidden_size=16).save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def remove(*names: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return apply


def name_no_end_token(folder: Path) -> None:
    """As of another class: Qwen2's own falls back to an end token of its own."""
    path = folder / "tokenizer_config.json"
    data = json.loads(path.read_text())
    del data["eos_token"]
    path.write_text(json.dumps({**data, "tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").unlink()


def test_a_whole_folder_loads(folder: Path) -> None:
    path = resolve_model_folder(str(folder), SilentObserver())
    assert path == str(folder)
    assert load_tokenizer(path).eos_token == "<|im_end|>"
    model = load_model(path, "bfloat16", "cpu")
    assert model.dtype == torch.bfloat16
    assert not model.training


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("tokenizer.json", "tokenizer_config.json"), "without tokenizer.json.*tokenizer_p"),
        (remove("chat_template.jinja"), "no chat template.*tokenizer_path="),
        (name_no_end_token, "names no end token.*tokenizer_path="),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer cannot be loaded"),
    ],
)
def test_damaged_tokenizers(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(str(folder))
    assert caught.value.exit_code == 2
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("model.safetensors"), "no file named model.safetensors.*Type model.path="),
        (remove("config.json"), "model cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{"), "model cannot be loaded"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"\x00" * 9),
            "model cannot be loaded",
        ),
    ],
)
def test_damaged_models(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder), "float32", "cpu")


def edit_weights(folder: Path, **changes: float | None) -> None:
    """Fills tensors with a number, or leaves them out."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name][0] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"
BERT = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def describe_bert(folder: Path) -> None:
    BertConfig(**BERT).save_pretrained(folder)


def write_bert(folder: Path) -> None:
    BertForMaskedLM(BertConfig(**BERT)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: edit_weights(f, **{HEAD: None}), rf"1 tensor \({HEAD}\)"),
        (lambda f: edit_weights(f, **{HEAD: None, UP: None}), rf"2 tensors \({HEAD}, {UP}\)"),
        (lambda f: edit_weights(f, **{UP: math.nan}), rf"NaN or .* in 1 tensor \({UP}\)"),
        (lambda f: edit_weights(f, **{HEAD: math.inf}), rf"NaN or .* in 1 tensor \({HEAD}\)"),
        (
            describe_bert,
            r"weights of the BertLMHeadModel.*bert\.emb.*lm_head.weight.*not have",
        ),
        (write_bert, "BertLMHeadModel is an encoder"),
    ],
)
def test_weights_that_are_missing_or_no_numbers_are_named(
    tmp_path, chat_tokenizer, build_qwen2, damage, message
):
    build_qwen2(chat_tokenizer, tied=False, hidden_size=16).save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=rf"{message}.*Type model\.path=") as caught:
        load_model(str(tmp_path), "float32", "cpu")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_servers_are_not_started_on_weights_that_are_no_numbers(
    tmp_path, chat_tokenizer, build_qwen2, value
):
    build_qwen2(chat_tokenizer, hidden_size=16).save_pretrained(tmp_path)
    check_weight_files(str(tmp_path))
    edit_weights(tmp_path, **{UP: value})
    with pytest.raises(ModelError, match=rf"NaN or infinite numbers in 1 tensor \({UP}\) of its"):
        check_weight_files(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ModelError, match=str(tmp_path)):
        check_weight_files(str(tmp_path))


def test_a_critic_may_start_from_a_checkpoint_without_head(tmp_path, chat_tokenizer, build_qwen2):
    build_qwen2(chat_tokenizer, tied=False, hidden_size=16).save_pretrained(tmp_path)
    edit_weights(tmp_path, **{HEAD: None})
    load_model(str(tmp_path), "float32", "cpu", needs_head=False)
    edit_weights(tmp_path, **{UP: None})
    with pytest.raises(ModelError, match=rf"1 tensor \({UP}\)"):
        load_model(str(tmp_path), "float32", "cpu", needs_head=False)


@pytest.mark.parametrize("path", ["./nothing", "/nothing", "runs/demo/t0/checkpoints", "~/nothing"])
def test_folder_that_does_not_exist(path):
    with pytest.raises(ModelError, match=r"no folder.*Type model\.path=builtin:calculator"):
        resolve_model_folder(path, SilentObserver())


def test_hub_ids_go_through_and_unknown_ones_say_what_is_allowed():
    assert resolve_model_folder("Qwen/Qwen2.5-1.5B", SilentObserver()) == "Qwen/Qwen2.5-1.5B"
    with pytest.raises(ModelError, match=r"no tokenizer came from the hub.*builtin:calculator"):
        load_tokenizer("nobody-x1/nothing-x1")
    with pytest.raises(ModelError, match=r"no model came from the hub.*builtin:calculator"):
        load_model("nobody-x1/nothing-x1", "float32", "cpu")
    with pytest.raises(ModelError, match=r"did you mean 'builtin:calculator'"):
        resolve_model_folder("builtin:calulator", SilentObserver())


def write_model(folder: Path, vocab_size: int) -> str:
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": vocab_size})
    )
    return str(folder)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_both_numbers(
    chat_tokenizer, tmp_path
):
    for enough in (len(chat_tokenizer), len(chat_tokenizer) + 64):
        check_tokenizer(chat_tokenizer, write_model(tmp_path, enough))
    with pytest.raises(ModelError) as error_info:
        check_tokenizer(chat_tokenizer, write_model(tmp_path, 100))
    text = str(error_info.value)
    assert 100 <= int(re.search(r"makes ids up to (\d+), and", text)[1]) < len(chat_tokenizer)
    assert "a vocabulary of 100 (largest id 99)" in text
    assert "Type tokenizer_path=null" in text
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"its config\.json cannot be loaded"):
        check_tokenizer(chat_tokenizer, str(tmp_path))


@pytest.mark.parametrize("use", ["nothing", "end of a turn", "template"])
def test_an_added_token_may_lie_beyond_if_nothing_makes_it(chat_tokenizer, tmp_path, use):
    tokenizer = copy.deepcopy(chat_tokenizer)
    size = len(tokenizer)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    folder = write_model(tmp_path, size)
    if use == "nothing":
        check_tokenizer(tokenizer, folder)
        return
    if use == "template":
        tokenizer.chat_template = "<image>" + tokenizer.chat_template
    else:
        tokenizer.eos_token = "<image>"
    with pytest.raises(ModelError, match=f"makes ids up to {size}, and"):
        check_tokenizer(tokenizer, folder)


def test_the_models_own_tokenizer_is_the_default(chat_tokenizer, tmp_path):
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
