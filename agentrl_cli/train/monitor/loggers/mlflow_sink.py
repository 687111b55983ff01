"""Metrics, parameters and traces in MLflow."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig, LoggerConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.records import Trajectory
from agentrl_cli.secret_masking import mask_secrets
from agentrl_cli.train.monitor.loggers.background_logger import LoggerSink
from agentrl_cli.train.monitor.trajectory_spans import (
    TrajectorySpan,
    build_spans,
    list_rewards,
)

#: What MLflow takes in one request, and of one parameter.
_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _MAX_PARAM_CHARS = 1000, 100, 6000
_RUN_TAG = "agentrl.run_id"
_CHECK_SECONDS = 30.0
_SPAN_TYPES = {
    "invoke_agent": "AGENT",
    "chat": "CHAT_MODEL",
    "execute_tool": "TOOL",
    "evaluation": "EVALUATOR",
}


def find_tracking_uri(logger: LoggerConfig) -> str | None:
    """The server: that of the configuration, else of the environment."""
    return logger.url or os.environ.get("MLFLOW_TRACKING_URI")


class MlflowSink(LoggerSink):
    """Logs one run of MLflow for a trial; resumed, it is the same run."""

    def __init__(
        self, logger: LoggerConfig, config: ExperimentConfig, run_id: str, location: str
    ) -> None:
        # In threads of its own, the library would wait for a dead server when the process ends.
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
        import mlflow

        uri = find_tracking_uri(logger) or mlflow.get_tracking_uri()
        # The library sends traces to the one server that it is told of.
        mlflow.set_tracking_uri(uri)
        self._client: Any = mlflow.MlflowClient(uri)
        self._model, self._with_content = config.model.path, logger.capture_content
        name = logger.project or config.experiment_name
        found = self._client.get_experiment_by_name(name)
        self._experiment_id = found.experiment_id if found else self._client.create_experiment(name)
        condition = f"tags.`{_RUN_TAG}` = '{run_id}'"
        runs = self._client.search_runs([self._experiment_id], condition, max_results=1)
        if runs:
            [run] = runs
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            tags = {_RUN_TAG: run_id, "agentrl.run_folder": location}
            run = self._client.create_run(
                self._experiment_id, run_name=config.trial_name, tags=tags
            )
        self._run_id: str = run.info.run_id
        #: Steps that are done again after an interruption have their traces.
        self._last_traced_step = int(run.data.metrics.get("step", -1))
        self._log_params(config, run.data.params)

    def _log_params(self, config: ExperimentConfig, known: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        values = _flatten(mask_secrets(config.model_dump(mode="json")))
        # What was logged once cannot be changed.
        params = [Param(name, text[:_MAX_PARAM_CHARS]) for name, text in values]
        for group in _batch(
            [param for param in params if param.key not in known], _PARAMS_PER_REQUEST
        ):
            self._client.log_batch(self._run_id, params=group)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        made = [Metric(_fix_name(name), value, now, step) for name, value in metrics.items()]
        for group in _batch(made, _METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=group)

    def log_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Sends a trace for each, with its rewards as tags and assessments."""
        if step <= self._last_traced_step:
            return
        traces = [
            (trace_id, list_rewards(trajectory))
            for trajectory in trajectories
            if (trace_id := self._log_trace(step, trajectory)) is not None
        ]
        self._assess(traces)

    def _log_trace(self, step: int, trajectory: Trajectory) -> str | None:
        spans = build_spans(trajectory, self._model, with_content=self._with_content)
        if not spans:
            return None
        root, made = spans[0], dict[int, Any]()
        rewards = {name.removeprefix("agentrl."): v for name, v in list_rewards(trajectory).items()}
        tags = {
            "step": step,
            "trajectory": trajectory.id,
            "task": trajectory.task_id,
            "failure": trajectory.failure.boundary if trajectory.failure else "none",
            **rewards,
        }
        for span in spans:
            given = {
                "name": span.name,
                "span_type": _SPAN_TYPES[span.kind],
                "inputs": _to_utf8(_show(span, span.inputs, "messages")),
                "attributes": dict(span.attributes),
                "start_time_ns": span.start_ns,
            }
            if span is root:
                one = self._client.start_trace(
                    **given,
                    tags={_fix_name(name): str(value) for name, value in tags.items()},
                    experiment_id=self._experiment_id,
                    run_id=self._run_id,
                )
            else:
                parent = made[id(span.parent)]
                one = self._client.start_span(
                    **given, trace_id=parent.trace_id, parent_id=parent.span_id
                )
            made[id(span)] = one
        trace_id: str = made[id(root)].trace_id
        for span in reversed(spans[1:]):
            self._client.end_span(trace_id, made[id(span)].span_id, **_end(span))
        self._client.end_trace(trace_id, **_end(root))
        return trace_id

    def _assess(self, traces: Sequence[tuple[str, Mapping[str, float]]]) -> None:
        import mlflow
        from mlflow.entities import AssessmentSource

        # Only what is there can be assessed.
        mlflow.flush_trace_async_logging()
        source = AssessmentSource("CODE", "agentrl")
        for trace_id, rewards in traces:
            for name, value in rewards.items():
                name = _fix_name(name.removeprefix("agentrl."))
                mlflow.log_feedback(trace_id=trace_id, name=name, value=value, source=source)

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


def _batch(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    remaining = iter(items)
    while batch := [*islice(remaining, size)]:
        yield batch


def _end(span: TrajectorySpan) -> dict[str, Any]:
    return {
        "outputs": _to_utf8(_show(span, span.outputs, "choices")),
        "status": "OK" if span.error is None else "ERROR",
        "end_time_ns": span.end_ns,
    }


def _show(span: TrajectorySpan, content: Any, name: str) -> Any:
    """Content as MLflow shows it: of a model call, as a chat."""
    if content is None or span.kind != "chat":
        return content
    if name == "messages":
        return {"messages": content}
    return {"choices": [{"index": n, "message": one} for n, one in enumerate(content)]}


def _to_utf8(content: Any) -> Any:
    """Plain data without lone surrogates, which no request can hold."""
    text = json.dumps(content, ensure_ascii=False, default=repr)
    return json.loads(text.encode("utf-8", "replace"))


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """``train.algorithm.kind`` and its value as text, of every key."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    else:
        yield _fix_name(name)[:250], str(value)


def _fix_name(name: str) -> str:
    """The name in the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


def check_server(logger: LoggerConfig, key: str, remedy: str) -> None:
    """Refuses a server that is not named, cannot be reached, or does not let us in.

    Raises:
        UserInputError: with what it answered, and what to type.
    """
    uri = find_tracking_uri(logger)
    if uri is None:
        raise UserInputError(
            f"loggers: mlflow: no server is named. Start one (mlflow server), and type "
            f"{key}.url=http://127.0.0.1:5000, or set MLFLOW_TRACKING_URI"
        )
    problem = [f"no answer from {uri} within {_CHECK_SECONDS:.0f} seconds"]
    # Loading it takes seconds, which are not the server's.
    from mlflow import MlflowClient

    def search() -> None:
        try:
            MlflowClient(uri).search_experiments(max_results=1)
            problem.clear()
        except Exception as error:
            problem[:] = [f"{uri}: {' '.join(str(error).split())[:300]}"]

    # The library tries again for minutes.
    thread = threading.Thread(target=search, name="agentrl-mlflow-check", daemon=True)
    thread.start()
    thread.join(_CHECK_SECONDS)
    if problem:
        raise UserInputError(f"loggers: mlflow: {problem[0]}. {remedy}")
