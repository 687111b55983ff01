"""Loggers: what is written can be read back; what is missing, or does not answer, says what to
type, and neither stops nor delays a run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import MissingExtraError, UserInputError
from agentrl_cli.train.loop import RunCoordinator
from agentrl_cli.train.monitor.loggers import background_logger, metric_sinks
from agentrl_cli.train.monitor.loggers.background_logger import BackgroundLogger
from agentrl_cli.train.monitor.loggers.logger_building import build_loggers, check_loggers


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


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    return SimpleNamespace(path=tmp_path, location=str(tmp_path), push=print)


def test_no_loggers(folder: Any) -> None:
    assert build_loggers(build_config(), folder, ExitStack(), print) == []
    assert list(folder.path.iterdir()) == []


def test_tensorboard_can_be_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", exc_type=ImportError
    )
    sink = metric_sinks.TensorboardSink(tmp_path)
    sink.log(1, {"reward_mean": 0.25, "reward_part_exact": 0.75})
    sink.log(2, {"reward_mean": 0.5, "loss": -1.0})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    # Before close: a run that is killed keeps what it logged.
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward_mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("reward_part_exact")] == [(1, 0.75)]
    sink.close(failed=False)


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("tensorboard", "tensorboard", "tensorboard"),
        ("wandb", "wandb", "wandb"),
        ("mlflow", "mlflow", "mlflow"),
        ("trackio", "trackio", "trackio"),
        ("otlp", "opentelemetry.exporter.otlp.proto.http", "otel"),
    ],
)
def test_a_missing_package_is_found_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, folder: Any, kind: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    check_loggers(build_config())
    for look in (check_loggers, lambda c: build_loggers(c, folder, ExitStack(), print)):
        with pytest.raises(MissingExtraError, match=rf"pip install 'agentrl-cli\[{extra}\]'"):
            look(build_config({"kind": kind}))


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        ({"kind": "tensorboard", "url": "http://x"}, "url is not for kind tensorboard"),
        ({"kind": "wandb", "capture_content": True}, "Allowed with: mlflow, otlp"),
        ({"kind": "otlp", "url": "collector:4318"}, "url"),
    ],
)
def test_keys_of_other_kinds_are_refused(logger: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_config(logger)


def test_a_saved_configuration_names_the_defaults_of_all_keys() -> None:
    config = build_config({"kind": "tensorboard"})
    assert ExperimentConfig.model_validate(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("kind", ["mlflow", "otlp", "trackio"])
def test_a_server_that_is_not_there_is_said_before_anything_starts(kind: str) -> None:
    pytest.importorskip("opentelemetry.sdk" if kind == "otlp" else kind)
    # Port 9 of loopback: nobody listens.
    config = build_config({"kind": kind, "url": "http://127.0.0.1:9"})
    with pytest.raises(
        UserInputError, match=rf"loggers: {kind}: .* refused\. .*correct loggers.0.url"
    ):
        check_loggers(config)


def test_mlflow_without_a_server_says_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UserInputError, match=r"type loggers.0.url=http://127.0.0.1:5000"):
        check_loggers(build_config({"kind": "mlflow"}))


class Sink:
    """Does with each step what a test says."""

    def __init__(self, act: Any = print) -> None:
        self.act = act
        self.steps: list[int] = []
        self.ends: list[bool] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.act(step)
        self.steps.append(step)

    def log_trajectories(self, step: int, trajectories: Any) -> None:
        raise AssertionError("none were given")

    def close(self, *, failed: bool) -> None:
        self.ends.append(failed)


def test_what_fails_is_said_once_and_tried_again() -> None:
    def fail_first(step: int) -> None:
        if step < 3:
            raise OSError(f"no route to host, {step}, key sk-123456789")

    sink, said = Sink(fail_first), list[str]()
    logger = BackgroundLogger("mlflow", lambda: sink, said.append, remedy="Do this.")
    for step in range(1, 5):
        logger.log(step, {"loss": 0.0})
    logger.close(failed=True)
    logger.close()
    assert (sink.steps, sink.ends) == ([3, 4], [True])
    assert said == [
        "loggers: mlflow: OSError: no route to host, 1, key ***. Training goes on, and "
        "metrics.jsonl in the run folder has all metrics. Do this."
    ]


def test_a_logger_that_cannot_be_opened_is_left_out() -> None:
    said = list[str]()

    def refuse() -> Any:
        raise PermissionError("401 Unauthorized")

    logger = BackgroundLogger("wandb", refuse, said.append, remedy="Type wandb login.")
    for step in range(200):
        logger.log(step, {})
    logger.close()
    assert len(said) == 1
    assert "401 Unauthorized" in said[0]


def test_a_server_that_hangs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_logger, "_CLOSE_SECONDS", 0.3)
    released, said = threading.Event(), list[str]()
    sink = Sink(lambda _: released.wait(60))
    logger = BackgroundLogger("otlp", lambda: sink, said.append, remedy="Start it.")
    started = time.monotonic()
    for step in range(1000):
        logger.log(step, {})
    assert "does not keep up" in said[0]
    logger.close()
    assert time.monotonic() - started < 10
    assert len(said) == 1
    released.set()


def test_evaluations_reach_every_logger() -> None:
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


WANDB = '''
import json, struct, sys
from contextlib import ExitStack
import wandb
from wandb.proto.wandb_internal_pb2 import Record
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.monitor.loggers.logger_building import build_loggers, check_loggers

config = ExperimentConfig.model_validate(json.loads(sys.argv[1]))
check_loggers(config)
for step in (1, 2, 3):
    with RunFolder.create_or_resume(config) as folder, ExitStack() as stack:
        [logger] = build_loggers(config, folder, stack, lambda text: sys.exit(text))
        logger.log(step, {"reward_mean": step / 4})
        logger.log(step, {"eval_mean_reward": 0.75})
    if step == 2:
        (folder.path / "logger_run_id.txt").unlink()

# Its service writes files whole when it ends.
wandb.teardown()

def read_records(content):
    """LevelDB's format of logs: blocks of 32 KiB, and records that may go over their borders."""
    position, data = 7, b""
    while position + 7 <= len(content):
        left = -position % 32768
        if 0 < left < 7:
            position += left
        length, kind = struct.unpack_from("<HB", content, position + 4)
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield data
            data = b""

found = []
for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
    for data in read_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            config = {item.key: item.value_json for item in record.run.config.update}
            found.append([record.run.project, record.run.run_id, config.get("trial_name")])
        if record.HasField("history"):
            items = record.history.item
            found.append({(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items})
print("READ", json.dumps(found))
'''


@pytest.mark.slow
def test_wandb_goes_on_in_the_run_of_the_trial(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    data = build_config({"kind": "wandb"}).model_dump(mode="json")
    command = [sys.executable, "-c", WANDB, json.dumps(data | {"output_dir": str(tmp_path)})]
    environment = os.environ | {"WANDB_MODE": "offline"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert "READ" in done.stdout, done.stdout + done.stderr
    found = json.loads(done.stdout.partition("READ ")[2].partition("\n")[0])
    runs = [entry for entry in found if isinstance(entry, list) and entry[2]]
    assert {(project, trial) for project, _, trial in runs} == {("exp", '"t7"')}
    ids = [run_id for _, run_id, _ in runs]
    assert len(ids) == 3
    assert len(set(ids)) == 2, "the third start is of a run begun anew"
    assert all(run_id.startswith("exp-t7-") for run_id in ids)
    rewards = {entry["_step"]: entry for entry in found if isinstance(entry, dict)}
    assert [rewards[step]["reward_mean"] for step in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert rewards[3]["eval_mean_reward"] == 0.75


def test_wandb_without_a_key_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    config = build_config({"kind": "wandb"})
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=r"loggers.0: wandb: .* Type wandb login"):
        check_loggers(config)


TRACKIO = """
import json, sys
from contextlib import ExitStack
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.train.monitor.loggers.logger_building import build_loggers

config = ExperimentConfig.model_validate(json.loads(sys.argv[1]))
for step in (1, 2):
    with RunFolder.create_or_resume(config) as folder, ExitStack() as stack:
        [logger] = build_loggers(config, folder, stack, lambda text: sys.exit(text))
        logger.log(step, {"reward_mean": step / 4, "reward_part_exact": 0.5})
        logger.log(step, {"eval_mean_reward": 0.75})

import trackio
from trackio.sqlite_storage import SQLiteStorage
[run] = trackio.Api().runs("exp")
print("READ", json.dumps([run.name, SQLiteStorage.get_logs("exp", run.name)], default=str))
"""


@pytest.mark.slow
def test_trackio_has_both_starts_of_a_trial_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    data = build_config({"kind": "trackio"}).model_dump(mode="json")
    command = [sys.executable, "-c", TRACKIO, json.dumps(data | {"output_dir": str(tmp_path)})]
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert "READ" in done.stdout, done.stdout + done.stderr
    name, rows = json.loads(done.stdout.partition("READ ")[2])
    assert name.startswith("exp-t7-")
    found = [(row["step"], row["reward_mean"]) for row in rows if row.get("reward_mean")]
    assert found == [(1, 0.25), (2, 0.5)]
    assert any(row.get("eval_mean_reward") == 0.75 for row in rows)
