"""Serving: what programs did is stored as it comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.launch.model_serving import ListenAddress, OnlineRecorder, _listen_at
from agentrl_cli.records import Trajectory
from agentrl_cli.store.resume_check import check_same_config, save_config
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.working_copy import LocalFolder


def make_config(tmp_path: Path, **rollout: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": "m"},
            "train_dataset": {"path": "d"},
            "engine": {"kind": "embedded"},
            "rollout": {"agent_mode": "external", **rollout},
        }
    )


def test_every_trajectory_is_stored_at_once_and_files_stay_small(tmp_path: Path) -> None:
    folder = RunFolder.for_evaluation(make_config(tmp_path))
    shown: list[str] = []
    recorder = OnlineRecorder(folder, shown.append)
    for number in range(35):
        name = f"000001.000/{number}"
        recorder.add(
            Trajectory(id=name, group_id="000001.000", task_id="0", reward=float(number % 2))
        )
        stored = [
            trajectory.id
            for step, label in folder.list_evals()
            for trajectory in folder.read_eval(step, label=label)[0]
        ]
        assert stored == [f"000001.000/{n}" for n in range(number + 1)]
    assert len(folder.list_evals()) == 2
    assert shown[1].startswith("000001.000/1  reward 1.000  0 turns")
    assert folder.trajectory_steps() == []


def test_a_run_resumes_at_another_address(tmp_path: Path) -> None:
    save_config(make_config(tmp_path), tmp_path)
    moved = make_config(tmp_path, external={"port": 8900, "max_sessions_per_attempt": 5})
    check_same_config(moved, LocalFolder(tmp_path))


def test_an_external_run_names_no_agent(tmp_path: Path) -> None:
    data = make_config(tmp_path).model_dump() | {"agent_builder_path": "a.b"}
    with pytest.raises(ValueError, match="agent_builder_path=null"):
        ExperimentConfig.model_validate(data)


@pytest.mark.parametrize(
    ("typed", "configured", "expected"),
    [
        (None, "0.0.0.0", "0.0.0.0"),
        ("127.0.0.1", "0.0.0.0", "127.0.0.1"),
        ("::1", "127.0.0.1", "::1"),
    ],
)
def test_the_address_that_is_typed_is_the_one(
    tmp_path: Path, typed: str | None, configured: str, expected: str
) -> None:
    config = make_config(tmp_path, external={"host": configured, "port": 8900})
    external = _listen_at(config, ListenAddress(host=typed)).rollout.external
    assert (external.host, external.port) == (expected, 8900)
