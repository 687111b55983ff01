"""What a run names is tried before anything starts: imports, rows, models, loggers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.local_run import try_input

AGENT = """
def build():
    async def run(data): ...
    return run

def needs_gold(completions, gold): ...
"""

Try = Callable[..., list[str]]


@pytest.fixture
def try_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat_tokenizer: Any, build_qwen2: Any
) -> Try:
    """Tries a configuration in a user's folder, with these keys changed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path / "cache"))
    build_qwen2(chat_tokenizer).save_pretrained("tiny")
    chat_tokenizer.save_pretrained("tiny")
    Path("own_agent.py").write_text(AGENT)
    Path("rows.jsonl").write_text(json.dumps({"question": "1+1", "answer": "2"}))

    def run(**changes: Any) -> list[str]:
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "model": {"path": "./tiny"},
                "agent_builder_path": "own_agent.py:build",
                "train_dataset": {"path": "rows.jsonl"},
                "engine": {"kind": "embedded"},
                **changes,
            }
        )
        try:
            resolved = resolve_run(config, Machine(gpu_ids=()), purpose="train")
            return try_input(config, resolved, overwrite=False)
        finally:
            assert not Path("runs").exists()

    return run


def test_what_is_here_is_looked_at_and_the_rest_is_named(try_it: Try) -> None:
    assert try_it() == []
    unseen = try_it(
        model={"path": "some/model"},
        valid_dataset={"path": "openai/gsm8k"},
        train={"critic": {"path": "builtin:calculator"}, "algorithm": {"kind": "ppo"}},
    )
    assert [line.partition(":")[0] for line in unseen] == [
        "valid_dataset.path",
        "model.path",
        "train.critic.path",
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"agent_builder_path": "own_agent.py:biuld"}, "did you mean 'build'?"),
        ({"reward_fn_path": "own_agent.py:needs"}, "did you mean 'needs_gold'?"),
        ({"reward_fn_path": "own_agent.py:needs_gold"}, "nothing supplies its argument 'gold'"),
        ({"valid_dataset": {"path": "row.jsonl"}}, "did you mean 'rows.jsonl'?"),
        ({"model": {"path": "./tinny"}}, "there is no folder './tinny'"),
        ({"model": {"path": "."}}, "without tokenizer.json"),
        ({"model": {"path": "builtin:calc"}}, "did you mean 'builtin:calculator'?"),
        ({"tokenizer_path": "./tinny"}, "tokenizer_path: there is no folder './tinny'"),
        ({"loggers": [{"kind": "wandb"}]}, "pip install 'agentrl-cli[wandb]'"),
        (
            {"train": {"critic": {"path": "."}, "algorithm": {"kind": "ppo"}}},
            "train.critic.path: .: found a folder without config.json and *.safetensors",
        ),
        # Which is built with a tokenizer that is not here.
        (
            {"model": {"path": "a/b"}, "workflow_path": "own_agent.py:Flow"},
            "workflow_path: 'own_agent.py:Flow': own_agent.py has no 'Flow'",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(
    try_it: Try, changes: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the extra is not installed.
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserInputError) as caught:
        try_it(**changes)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [("config.json", "without config.json"), ("model.safetensors", "without *.safetensors")],
)
def test_a_folder_that_lacks_a_part_of_its_model_is_refused(
    try_it: Try, missing: str, expected: str
) -> None:
    Path("tiny", missing).unlink()
    with pytest.raises(UserInputError) as caught:
        try_it()
    assert expected in str(caught.value)
