"""Where metrics go besides the run folder: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from agentrl_cli.config.experiment import ExperimentConfig, LoggerConfig
from agentrl_cli.errors import MissingExtraError
from agentrl_cli.secret_masking import mask_secrets
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import write_text


class MetricsLogger(Protocol):
    """Receives the metrics of every step, and those of evaluations."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records metrics of one step; those of an evaluation after it come in a call of their
        own."""
        ...

    def close(self) -> None:
        """Writes what is left; may be called twice."""
        ...


def check_loggers(config: ExperimentConfig) -> None:
    """Refuses loggers that cannot be built.

    Raises:
        MissingExtraError: a logger's package is not installed.
    """
    for logger in config.loggers:
        if importlib.util.find_spec(logger.kind) is None:
            raise _missing(logger.kind, "there is no such module")


def build_loggers(config: ExperimentConfig, run_dir: Path, stack: ExitStack) -> list[MetricsLogger]:
    """The loggers of ``config.loggers``, in its order; the end of ``stack`` closes them.

    Raises:
        MissingExtraError: a logger's package is not installed.
    """
    loggers: list[MetricsLogger] = []
    for logger in config.loggers:
        if logger.kind == "tensorboard":
            loggers.append(TensorboardLogger(run_dir / layout.TENSORBOARD))
        else:
            loggers.append(WandbLogger(logger, config, run_dir))
        stack.callback(loggers[-1].close)
    return loggers


class TensorboardLogger:
    """Writes event files into one folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard", error) from error
        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of one step and makes them visible."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


class WandbLogger:
    """Sends metrics to Weights & Biases; a resumed trial continues in the same run, one begun
    anew (``--overwrite``) begins another."""

    def __init__(self, logger: LoggerConfig, config: ExperimentConfig, run_dir: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", error) from error
        self._run: Any = wandb.init(
            project=logger.project or config.experiment_name,
            name=config.trial_name,
            id=_read_run_id(run_dir / layout.WANDB_RUN_ID, config),
            resume="allow",
            dir=str(run_dir),
            config=mask_secrets(config.model_dump(mode="json")),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Waits until everything is sent."""
        self._run.finish()


def _read_run_id(path: Path, config: ExperimentConfig) -> str:
    """The id of this run folder's run, chosen at its first start."""
    if not path.is_file():
        unique = uuid.uuid4().hex[:8]
        write_text(path, f"{config.experiment_name}-{config.trial_name}-{unique}\n")
    return path.read_text(encoding="utf-8").strip()


def _missing(package: str, error: ImportError | str) -> MissingExtraError:
    return MissingExtraError(
        f"loggers: kind {package} needs the package {package}, which does not import ({error}). "
        f"Type: pip install 'agentrl-cli[{package}]'"
    )
