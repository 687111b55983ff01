"""Loggers: what is written can be read back; what is missing says what to type."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.train.monitor.loggers import build_loggers


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
    (_, arguments), *rest = calls
    assert arguments["project"] == "exp"
    assert arguments["id"] == "exp-t7"
    assert arguments["resume"] == "allow"
    assert arguments["config"]["trial_name"] == "t7"
    assert rest == [("log", (3, {"loss": 1.0})), ("finish", None)]
