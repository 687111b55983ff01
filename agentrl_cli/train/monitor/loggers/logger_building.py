"""The loggers of a configuration: whether they can be used, and made."""

from __future__ import annotations

import importlib.util
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from agentrl_cli.config.experiment import ExperimentConfig, LoggerConfig
from agentrl_cli.errors import MissingExtraError, UserInputError
from agentrl_cli.log import sanitize
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import write_text
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.monitor.loggers.background_logger import (
    BackgroundLogger,
    LoggerSink,
    Warn,
)
from agentrl_cli.train.monitor.loggers.metric_sinks import (
    TensorboardSink,
    TrackioSink,
    WandbSink,
    has_wandb_key,
)
from agentrl_cli.train.monitor.loggers.mlflow_sink import (
    MlflowSink,
    check_server,
    find_tracking_uri,
)
from agentrl_cli.train.monitor.loggers.otlp_sink import OtlpSink, check_collector

#: The module of each kind, and the extra that brings it.
_PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "trackio": ("trackio", "trackio"),
    "otlp": ("opentelemetry.exporter.otlp.proto.http", "otel"),
}
_CHECK_SECONDS = 30.0


def check_packages(config: ExperimentConfig) -> None:
    """Refuses loggers whose packages are not installed.

    Raises:
        MissingExtraError: a logger's package is not installed.
    """
    for logger in config.loggers:
        module, extra = _PACKAGES[logger.kind]
        try:
            is_there = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            is_there = False
        if not is_there:
            raise MissingExtraError(
                f"loggers: kind {logger.kind} needs the package {module}, which is not installed. "
                f"Type: pip install 'agentrl-cli[{extra}]'"
            )


def check_loggers(config: ExperimentConfig) -> None:
    """Refuses loggers that cannot be used: what is not installed, a server that does not answer,
    a service that nobody is logged in to.

    Raises:
        MissingExtraError: a logger's package is not installed.
        UserInputError: a logger's server cannot be reached or refuses us, or its key is missing.
    """
    check_packages(config)
    for number, logger in enumerate(config.loggers):
        remedy = _find_remedy(number, logger)
        server = _find_server(logger)
        if server is not None:
            _check_answers(logger.kind, server, remedy)
        if logger.kind == "mlflow":
            check_server(logger, f"loggers.{number}", remedy)
        elif logger.kind == "otlp":
            check_collector(logger, config, remedy)
        elif logger.kind == "wandb" and not has_wandb_key():
            raise UserInputError(
                f"loggers.{number}: wandb: no key of Weights & Biases was found. {remedy}"
            )


def _find_server(logger: LoggerConfig) -> str | None:
    """The address at which something must answer; None: there is none, or a library alone knows."""
    if logger.kind != "mlflow":
        return logger.url
    uri = find_tracking_uri(logger)
    return uri if uri is not None and uri.startswith(("http://", "https://")) else None


def _check_answers(kind: str, url: str, remedy: str) -> None:
    """Refuses a URL at which nothing answers; what does, may answer what it likes.

    Raises:
        UserInputError: with what happened, and what to type.
    """
    try:
        with urllib.request.urlopen(url, timeout=_CHECK_SECONDS):
            pass
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        text = sanitize(f"loggers: {kind}: {url}: {reason}. {remedy}")
        raise UserInputError(text) from None


def _find_remedy(number: int, logger: LoggerConfig) -> str:
    without = "type loggers=[] to train without"
    advice = {
        "tensorboard": "Free some space",
        "wandb": "Type wandb login, or set WANDB_MODE=offline",
        "mlflow": f"Start the server (mlflow server), correct loggers.{number}.url, or set "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        "trackio": f"Start the server (trackio show), correct loggers.{number}.url",
        "otlp": f"Start the collector, correct loggers.{number}.url, or set "
        "OTEL_EXPORTER_OTLP_HEADERS for its key",
    }
    return f"{advice[logger.kind]}; or {without}"


def build_loggers(
    config: ExperimentConfig, folder: RunFolder, stack: ExitStack, warn: Warn
) -> list[BackgroundLogger]:
    """The loggers of ``config.loggers``, in its order; the end of ``stack`` closes them.

    Args:
        config: the experiment.
        folder: the run's.
        stack: holds the loggers.
        warn: shows a line where one does not work.

    Raises:
        MissingExtraError: a logger's package is not installed.
    """
    check_packages(config)
    loggers: list[BackgroundLogger] = []
    run_id = _read_run_id(folder, config) if config.loggers else ""
    for number, logger in enumerate(config.loggers):
        traces = logger.kind in ("mlflow", "otlp")
        background = BackgroundLogger(
            logger.kind,
            _choose_sink(logger, config, folder, run_id),
            warn,
            remedy=_find_remedy(number, logger),
            max_trajectories=logger.max_trajectories if traces else 0,
        )
        loggers.append(stack.enter_context(background))
    return loggers


def _choose_sink(
    logger: LoggerConfig, config: ExperimentConfig, folder: RunFolder, run_id: str
) -> Callable[[], LoggerSink]:
    if logger.kind == "tensorboard":
        return partial(TensorboardSink, folder.path)
    if logger.kind == "wandb":
        return partial(WandbSink, logger, config, folder.path, run_id)
    if logger.kind == "mlflow":
        return partial(MlflowSink, logger, config, run_id, folder.location)
    if logger.kind == "trackio":
        return partial(TrackioSink, logger, config, run_id)
    return partial(OtlpSink, logger, config, run_id)


def _read_run_id(folder: RunFolder, config: ExperimentConfig) -> str:
    """The id of this run folder's run, chosen at its first start."""
    path = folder.path / layout.LOGGER_RUN_ID
    if not path.is_file():
        unique = uuid.uuid4().hex[:8]
        write_text(path, f"{config.experiment_name}-{config.trial_name}-{unique}\n")
        folder.push(layout.LOGGER_RUN_ID)
    return path.read_text(encoding="utf-8").strip()
