from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store.run_folder import RunFolder


@pytest.fixture
def make_config(tmp_path: Path):
    """Builds a small configuration whose run folder lies in the test's folder."""

    def make(**changes: Any) -> ExperimentConfig:
        data: dict[str, Any] = {
            "experiment_name": "exp",
            "trial_name": "t0",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": "builtin:calculator"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "tasks.jsonl"},
        }
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if name:
                data.setdefault(section, {})[name] = value
            else:
                data[section] = value
        return ExperimentConfig.model_validate(data)

    return make


@pytest.fixture
def folder(make_config):
    with RunFolder.create_or_resume(make_config()) as run:
        yield run


@pytest.fixture(params=["folder", "object_storage"])
def anywhere(request: pytest.FixtureRequest, make_config):
    """Builds configurations as ``make_config`` does, with the run folder in either place."""
    if request.param == "folder":
        return make_config
    return partial(make_config, output_dir=f"{request.getfixturevalue('s3_bucket')}/runs")


@pytest.fixture
def folder_anywhere(anywhere):
    with RunFolder.create_or_resume(anywhere()) as run:
        yield run


@pytest.fixture
def write_until_killed(tmp_path: Path, make_config):
    """Runs a program with the path of the configuration; SIGKILL after so many lines and then some
    seconds. What it printed is returned; the last line may be cut short."""
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(make_config().model_dump(mode="json")))

    def write(program: str, num_lines: int, seconds: float) -> list[str]:
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(num_lines)]
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
            return lines + process.stdout.readlines()

    return write


@pytest.fixture
def limited_file_size():
    """A context in which the kernel refuses larger files, as a full disk would."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)

    return limit
