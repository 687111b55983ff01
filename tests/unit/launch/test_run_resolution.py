from __future__ import annotations

import copy
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
        ({"model_type": "qwen2", "tie_word_embeddings": True}, True),
        ({"model_type": "gemma", "tie_word_embeddings": False}, False),
        # Not said: Qwen2's default is untied, Gemma's is tied.
        ({"model_type": "qwen2"}, False),
        ({"model_type": "gemma"}, True),
    ],
)
def test_the_tie_is_read_from_the_models_folder(
    values: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert has_tied_embeddings(write_config(tmp_path, **values)) is expected


@pytest.mark.parametrize("text", [None, "", "[1"])
def test_a_configuration_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be loaded"):
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
    folder = write_config(tmp_path, model_type="qwen2", tie_word_embeddings=True)
    config = make_config(folder, lora, **engine)
    machine = Machine(gpu_ids=tuple(map(str, range(num_gpus))))
    run = resolve_run(config, machine, purpose=purpose)
    assert with_output_head(run, config, folder).untied_head is expected


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (QWEN3, [], "tool calls are read as hermes (auto), reasoning as qwen3 (auto)"),
        (
            "{{ x }}",
            ["[TOOL_CALLS]"],
            "tool calls are read as mistral (auto), reasoning as none (auto)",
        ),
    ],
)
def test_auto_is_told_by_template_and_special_tokens(
    tmp_path: Path, chat_tokenizer: Any, template: str, tokens: list[str], expected: str
) -> None:
    tokenizer = copy.deepcopy(chat_tokenizer)
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(tmp_path)
    assert describe_reading(make_config(str(tmp_path))) == expected


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
