from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.launch.head import has_tied_embeddings, needs_untied_head


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
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": folder, "lora": lora},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
            "engine": engine,
        }
    )
    assert needs_untied_head(config, folder, purpose=purpose, num_gpus=num_gpus) is expected
