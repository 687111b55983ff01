"""Trajectories as spans, to any collector of OpenTelemetry over OTLP/HTTP."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl_cli import __version__
from agentrl_cli.config.experiment import ExperimentConfig, LoggerConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.records import Trajectory
from agentrl_cli.train.monitor.loggers.background_logger import LoggerSink
from agentrl_cli.train.monitor.trajectory_spans import (
    TrajectorySpan,
    build_spans,
    list_content,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

#: Seconds that one request may take, its retries included.
_SEND_SECONDS = 10.0
_LIBRARY = "opentelemetry.exporter.otlp.proto.http"


class OtlpSink(LoggerSink):
    """Sends the spans of each trajectory in one request.

    The ids of traces are made of the run and the trajectory: a step that is done again after an
    interruption gives the same trace.
    """

    def __init__(self, logger: LoggerConfig, config: ExperimentConfig, run_id: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._errors = _LastError()
        self._exporter: Any = OTLPSpanExporter(
            endpoint=find_endpoint(logger), timeout=_SEND_SECONDS
        )
        self._model, self._with_content = config.model.path, logger.capture_content
        self._run_id, self._finished, self._ids = run_id, InMemorySpanExporter(), _Ids()
        # It is of the library's class in all but its base, which only the library could load.
        ids: Any = self._ids
        names = {
            "service.name": os.environ.get("OTEL_SERVICE_NAME", "agentrl"),
            "service.version": __version__,
            "agentrl.experiment": config.experiment_name,
            "agentrl.trial": config.trial_name,
            "agentrl.run_id": run_id,
        }
        provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create(names),
            shutdown_on_exit=False,
            span_limits=SpanLimits(),
            id_generator=ids,
        )
        provider.add_span_processor(SimpleSpanProcessor(self._finished))
        self._tracer = provider.get_tracer("agentrl", __version__)

    def check(self) -> None:
        """Sends no span, to see whether the collector takes it.

        Raises:
            ConnectionError: it does not.
        """
        self._send([])

    def log_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            spans = build_spans(trajectory, self._model, with_content=self._with_content)
            self._ids.begin_trace(f"{self._run_id} {step} {trajectory.id}")
            self._record(spans)
            finished = self._finished.get_finished_spans()
            self._finished.clear()
            self._send(finished)

    def close(self, *, failed: bool) -> None:
        self._exporter.shutdown()
        self._errors.close()

    def _record(self, spans: Sequence[TrajectorySpan]) -> None:
        from opentelemetry import context, trace

        contexts: dict[int, Any] = {id(None): context.Context()}
        for span in spans:
            content = list_content(span) if self._with_content else {}
            made = self._tracer.start_span(
                span.name,
                context=contexts[id(span.parent)],
                kind=trace.SpanKind.CLIENT if span.kind == "chat" else trace.SpanKind.INTERNAL,
                attributes={**span.attributes, **content},
                start_time=span.start_ns,
            )
            if span.error is not None:
                made.set_status(trace.StatusCode.ERROR, span.error)
            contexts[id(span)] = trace.set_span_in_context(made, context.Context())
            made.end(end_time=span.end_ns)

    def _send(self, spans: Sequence[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise ConnectionError(self._errors.text or "the collector does not take the spans")


def find_endpoint(logger: LoggerConfig) -> str | None:
    """The full URL that spans are sent to; None: as the environment of OpenTelemetry says."""
    url = logger.url
    if url is None:
        return None
    has_path = url.partition("://")[2].rstrip("/").count("/") > 0
    return url if has_path else f"{url.rstrip('/')}/v1/traces"


def check_collector(logger: LoggerConfig, config: ExperimentConfig, remedy: str) -> None:
    """Refuses a collector that does not take spans.

    Raises:
        UserInputError: with what it answered, and what to type.
    """
    sink = OtlpSink(logger, config, "check")
    try:
        sink.check()
    except ConnectionError as error:
        reason = str(error).rstrip(".")
        raise UserInputError(f"loggers: otlp: {reason}. {remedy}") from None
    finally:
        sink.close(failed=False)


class _LastError(logging.Handler):
    """What the library says of a request that failed, which it gives no other way: kept, and not
    printed into the progress display."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self._logger = logging.getLogger(_LIBRARY)
        self._propagates = self._logger.propagate
        self._logger.addHandler(self)
        self._logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = self._propagates
        super().close()


class _Ids:
    """Ids that are the same whenever the same trajectory is sent."""

    def __init__(self) -> None:
        self._name, self._num_spans = "", 0

    def begin_trace(self, name: str) -> None:
        self._name, self._num_spans = name, 0

    def generate_trace_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:16])

    def generate_span_id(self) -> int:
        self._num_spans += 1
        text = f"{self._name} {self._num_spans}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])

    def is_trace_id_random(self) -> bool:
        return False
