"""The models of a run, or which of them cannot be loaded and what to type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.errors import ModelError
from agentrl_cli.launch.run_models import load_learner
from agentrl_cli.models import builtin_models
from agentrl_cli.train.ranks import SINGLE, Ranks


@pytest.fixture
def load(tmp_path: Path, chat_tokenizer: Any, build_qwen2: Callable[..., Any]):
    """A learner whose critic starts from a path."""
    policy = tmp_path / "policy"
    build_qwen2(chat_tokenizer).save_pretrained(policy)

    def load_with(path: str, ranks: Ranks = SINGLE) -> Any:
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": str(policy), "dtype": "float32"},
                "agent_builder_path": "a.b",
                "train_dataset": {"path": "rows.jsonl"},
                "engine": {"kind": "embedded"},
                "train": {"algorithm": {"kind": "ppo"}, "critic": {"path": path}},
            }
        )
        run = resolve_run(config, Machine(), purpose="train")
        return load_learner(config, run, str(policy), chat_tokenizer, ranks=ranks)

    return load_with


def test_a_critic_starts_from_a_folder_or_a_built_in_model(
    load, tmp_path: Path, chat_tokenizer, build_qwen2, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = tmp_path / "wide"
    build_qwen2(chat_tokenizer, hidden_size=96).save_pretrained(wide)
    monkeypatch.setattr(builtin_models, "_make_calculator_model", lambda *_: wide)
    for path in (str(wide), "builtin:calculator"):
        assert load(path)._critic.value_model.head.weight.shape == (1, 96)


def test_what_a_critic_cannot_start_from_is_named_by_its_own_key(
    load, tmp_path: Path, chat_tokenizer, build_qwen2
) -> None:
    (tmp_path / "empty").mkdir()
    narrow = tmp_path / "narrow"
    model = build_qwen2(chat_tokenizer)
    model.resize_token_embeddings(len(chat_tokenizer) - 7)
    model.save_pretrained(narrow)
    wrong = {
        "./nowhere": "there is no folder './nowhere'",
        "builtin:other": "'builtin:other' is not a built-in model",
        str(tmp_path / "empty"): "config.json.* Type train.critic.path= with a folder",
        str(narrow): f"knows {len(chat_tokenizer) - 7} tokens.* Type train.critic.path=null",
    }
    for path, message in wrong.items():
        with pytest.raises(ModelError, match=f"^train.critic.path: .*{message}") as caught:
            load(path)
        assert "model.path" not in str(caught.value)


def test_ranks_with_other_weights_are_named(load, tmp_path: Path) -> None:
    class ThreeRanks(Ranks):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, value, "another"]

    with pytest.raises(ModelError, match=r"^model.path: .* ranks \[2\] are not those of rank 0"):
        load(str(tmp_path / "policy"), ThreeRanks())
