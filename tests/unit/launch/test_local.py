"""What the command refuses before it writes or starts anything."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch import local
from agentrl_cli.log import SilentObserver


@pytest.mark.parametrize(
    ("kind", "count", "advice"),
    [
        ("vllm", 2, r"Type train\.num_processes=1, or give engine servers fewer"),
        ("embedded", 3, r"Type train\.num_processes=2$"),
    ],
)
def test_more_trainers_than_gpus_leave_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int, advice: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(local, "find_server_versions", lambda *_, **__: {})
    monkeypatch.setattr(local, "check_input", lambda _: None)
    Path("rows.jsonl").write_text('{"question": "1 + 1"}\n')
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "some/model"},
            "agent_builder_path": "a.b",
            "reward_fn_path": "a.c",
            "train_dataset": {"path": "rows.jsonl"},
            "engine": {"kind": kind},
            "train": {"num_processes": count},
        }
    )
    with pytest.raises(UserInputError, match=advice):
        local.run_training(
            config, observer=SilentObserver(), overwrite=False, stop=threading.Event()
        )
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
