"""TensorBoard, Weights & Biases and Trackio: metrics alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl_cli.config.experiment import ExperimentConfig, LoggerConfig
from agentrl_cli.secret_masking import mask_secrets
from agentrl_cli.store import layout
from agentrl_cli.train.monitor.loggers.background_logger import LoggerSink


class TensorboardSink(LoggerSink):
    """Writes event files into the run folder."""

    def __init__(self, run_dir: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / layout.TENSORBOARD))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def has_wandb_key() -> bool:
    """Whether W&B can be used without asking for a key, which it does at a terminal.

    ``wandb.login`` would tell, but waits for the service without a deadline.
    """
    import wandb

    settings = wandb.setup().settings
    if settings.mode != "online" or settings.api_key or settings.identity_token_file:
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        stored = netrc(path).authenticators(urlsplit(settings.base_url).hostname or "")
    except (OSError, NetrcParseError):
        return False
    return stored is not None


class WandbSink(LoggerSink):
    """Sends metrics to Weights & Biases; a resumed trial continues in the same run, one begun
    anew (``--overwrite``) begins another."""

    def __init__(
        self, logger: LoggerConfig, config: ExperimentConfig, run_dir: Path, run_id: str
    ) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=logger.project or config.experiment_name,
            name=config.trial_name,
            id=run_id,
            resume="allow",
            dir=str(run_dir),
            config=mask_secrets(config.model_dump(mode="json")),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class TrackioSink(LoggerSink):
    """Writes metrics to Trackio's local database, or sends them to a server of it."""

    def __init__(self, logger: LoggerConfig, config: ExperimentConfig, run_id: str) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=logger.project or config.experiment_name,
            name=run_id,
            group=config.trial_name,
            server_url=logger.url,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
            config=mask_secrets(config.model_dump(mode="json")),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()
