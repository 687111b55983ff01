from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
