"""What a dry run says of how replies will be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.launch.reading import describe_reading

QWEN3 = "{{ '<tool_call>' }}{% if '</think>' in content %}{% endif %}"


def make_config(model: str, **engine: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "x",
            "model": {"path": model},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "x.jsonl"},
            "engine": engine,
        }
    )


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
    expected = "tool calls are read as hermes (auto), thoughts as qwen3 (auto)"
    assert describe_reading(make_config(str(tmp_path))) == expected


def test_special_tokens_tell_a_family_too(tmp_path: Path) -> None:
    tokens = {"5": {"content": "[TOOL_CALLS]", "special": True}}
    config = {"chat_template": "{{ x }}", "added_tokens_decoder": tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    line = describe_reading(make_config(str(tmp_path)))
    assert line == "tool calls are read as mistral (auto), thoughts as none (auto)"


def test_names_are_shown_as_they_were_typed() -> None:
    config = make_config("some/model", tool_call_parser="qwen25", reasoning_parser="none")
    assert describe_reading(config) == "tool calls are read as qwen25, thoughts as none"


@pytest.mark.parametrize("model", ["some/model-that-was-never-fetched", "no/such/folder"])
def test_model_that_is_not_here_is_told_later(model: str) -> None:
    assert "once the tokenizer is loaded" in describe_reading(make_config(model))


def test_broken_config_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "once the tokenizer is loaded" in describe_reading(make_config(str(tmp_path)))


def test_built_in_models_are_known() -> None:
    line = describe_reading(make_config("builtin:calculator"))
    assert line == "tool calls are read as hermes (auto), thoughts as none (auto)"
