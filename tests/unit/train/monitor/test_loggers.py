"""Loggers: what is written can be read back; what is missing says what to type."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.train.loop import RunCoordinator
from agentrl_cli.train.monitor.loggers import build_loggers, check_loggers


def build_config(*loggers: dict[str, Any]) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "trial_name": "t7",
            "model": {"path": "none"},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "loggers": loggers,
        }
    )


def test_no_loggers(tmp_path: Path):
    assert build_loggers(build_config(), tmp_path, ExitStack()) == []
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_can_be_read_back(tmp_path: Path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError
    )
    (logger,) = build_loggers(build_config({"kind": "tensorboard"}), tmp_path, ExitStack())
    logger.log(1, {"reward_mean": 0.25})
    logger.log(2, {"reward_mean": 0.5, "loss": -1.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    # Before close: a run that is killed keeps what it logged.
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(2, -1.0)]
    logger.close()
    logger.close()


@pytest.mark.parametrize(
    ("kind", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_missing_package_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, module: str
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'agentrl-cli\[{kind}\]'"):
        build_loggers(build_config({"kind": kind}), tmp_path, ExitStack())


def test_a_missing_package_is_found_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    check_loggers(build_config())
    with pytest.raises(MissingExtraError, match=r"pip install 'agentrl-cli\[wandb\]'"):
        check_loggers(build_config({"kind": "wandb"}))


def test_evaluations_reach_every_logger(tmp_path: Path):
    names = [field.name for field in dataclasses.fields(RunCoordinator) if field.init]
    logged: list[tuple[int, Any]] = []
    logger = SimpleNamespace(log=lambda step, metrics: logged.append((step, metrics)))
    config = build_config().model_copy(
        update={"valid_dataset": DatasetConfig(path="x"), "train": TrainConfig(total_steps=4)}
    )
    parts: dict[str, Any] = {
        "config": config,
        "folder": SimpleNamespace(eval_steps=lambda: [4]),
        "evaluate": lambda step: {"eval_mean_reward": step / 4},
        "loggers": [logger, logger],
    }
    coordinator = RunCoordinator(**(dict.fromkeys(names) | parts))
    for step in range(5):
        coordinator.evaluate_if_due(step)
    # Before the first step; that after the last was done before an interruption.
    assert logged == [(0, {"eval_mean_reward": 0.0})] * 2


def test_wandb_goes_on_in_the_run_of_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda metrics, step: calls.append(("log", (step, metrics))),
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**arguments: Any) -> SimpleNamespace:
        calls.append(("init", arguments))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    (logger,) = build_loggers(build_config({"kind": "wandb"}), tmp_path, ExitStack())
    logger.log(3, {"loss": 1.0})
    logger.close()
    (_, arguments), *rest = list(calls)
    assert arguments["project"] == "exp"
    assert arguments["id"].startswith("exp-t7-")
    build_loggers(build_config({"kind": "wandb"}), tmp_path, ExitStack())
    (tmp_path / "wandb_run_id.txt").unlink()
    build_loggers(build_config({"kind": "wandb"}), tmp_path, ExitStack())
    ids = [arguments["id"] for call, arguments in calls if call == "init"]
    assert ids[0] == ids[1] != ids[2]
    assert arguments["resume"] == "allow"
    assert arguments["config"]["trial_name"] == "t7"
    assert rest == [("log", (3, {"loss": 1.0})), ("finish", None)]
