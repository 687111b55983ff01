from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.errors import ModelError
from agentrl_cli.launch.run_resolution import (
    describe_reading,
    has_tied_embeddings,
    with_output_head,
)

QWEN3 = "{{ '<tool_call>' }}{% if '</think>' in content %}{% endif %}"


def make_config(model: str, lora: Any = None, **engine: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "x",
            "model": {"path": model, "lora": lora},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "x.jsonl"},
            "engine": engine,
        }
    )


def write_config(folder: Path, **values: Any) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": False}, False),
        ({"text_config": {"tie_word_embeddings": True}, "tie_word_embeddings": False}, True),
        # Not said: Qwen2's default is untied, Gemma's is tied.
        ({"model_type": "qwen2"}, False),
        ({"model_type": "gemma"}, True),
    ],
)
def test_the_tie_is_read_from_the_models_folder(
    values: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert has_tied_embeddings(write_config(tmp_path, **values)) is expected


@pytest.mark.parametrize("text", ["", "[1", "\x00"])
def test_a_damaged_configuration_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        has_tied_embeddings(str(tmp_path))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        has_tied_embeddings(str(tmp_path))


@pytest.mark.parametrize(
    ("engine", "lora", "purpose", "num_gpus", "expected"),
    [
        ({"kind": "vllm"}, None, "train", 0, True),
        ({"kind": "vllm"}, None, "eval", 0, False),
        ({"kind": "vllm"}, {}, "train", 0, False),
        ({"kind": "vllm"}, None, "train", 1, False),
        ({"kind": "vllm", "device": "cpu"}, None, "train", 1, True),
        ({"kind": "embedded"}, None, "train", 0, False),
    ],
)
def test_only_servers_on_cpu_that_get_weights_need_a_head_of_their_own(
    engine: dict[str, Any], lora: Any, purpose: Any, num_gpus: int, expected: bool, tmp_path: Path
) -> None:
    folder = write_config(tmp_path, tie_word_embeddings=True)
    config = make_config(folder, lora, **engine)
    machine = Machine(gpu_ids=tuple(map(str, range(num_gpus))))
    run = resolve_run(config, machine, purpose=purpose)
    assert with_output_head(run, config, folder).untied_head is expected


@pytest.mark.parametrize("where", ["file", "config", "list"])
def test_auto_is_told_by_the_files_of_the_model(tmp_path: Path, where: str) -> None:
    config: dict[str, Any] = {}
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(QWEN3)
    elif where == "config":
        config["chat_template"] = QWEN3
    else:
        config["chat_template"] = [{"name": "default", "template": QWEN3}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = "tool calls are read as hermes (auto), reasoning as qwen3 (auto)"
    assert describe_reading(make_config(str(tmp_path))) == expected


def test_special_tokens_tell_a_family_too(tmp_path: Path) -> None:
    tokens = {"5": {"content": "[TOOL_CALLS]", "special": True}}
    config = {"chat_template": "{{ x }}", "added_tokens_decoder": tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    line = describe_reading(make_config(str(tmp_path)))
    assert line == "tool calls are read as mistral (auto), reasoning as none (auto)"


def test_names_are_shown_as_they_were_typed_and_built_in_models_are_known() -> None:
    config = make_config("some/model", tool_call_parser="qwen25", reasoning_parser="none")
    assert describe_reading(config) == "tool calls are read as qwen25, reasoning as none"
    line = describe_reading(make_config("builtin:calculator"))
    assert line == "tool calls are read as hermes (auto), reasoning as none (auto)"


@pytest.mark.parametrize("model", ["some/model-that-was-never-fetched", "no/such/folder", "{dir}"])
def test_a_model_that_cannot_be_read_yet_is_described_later(model: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    config = make_config(model.format(dir=tmp_path))
    assert "once the tokenizer is loaded" in describe_reading(config)
