from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.errors import ModelError
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.builtin_models import resolve_model_folder
from agentrl_cli.models.pretrained import load_model, load_tokenizer
from agentrl_cli.models.tokenizer_training import train_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(["some text"], vocab_size=300)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
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


@pytest.mark.parametrize("path", ["./nothing", "/nothing", "runs/demo/t0/checkpoints", "~/nothing"])
def test_folder_that_does_not_exist(path: str) -> None:
    with pytest.raises(ModelError, match=r"no folder.*Type model\.path=builtin:calculator"):
        resolve_model_folder(path, SilentObserver())


def test_hub_id_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_folder("Qwen/Qwen2.5-1.5B", SilentObserver()) == "Qwen/Qwen2.5-1.5B"


def test_unknown_hub_id_says_what_is_allowed() -> None:
    with pytest.raises(ModelError, match=r"no tokenizer came from the hub.*builtin:calculator"):
        load_tokenizer("nobody-x1/nothing-x1")
    with pytest.raises(ModelError, match=r"no model came from the hub.*builtin:calculator"):
        load_model("nobody-x1/nothing-x1", "float32", "cpu")


def test_unknown_builtin() -> None:
    with pytest.raises(ModelError, match=r"did you mean 'builtin:calculator'"):
        resolve_model_folder("builtin:calulator", SilentObserver())
