"""Trajectories as spans: who belongs to whom and when, on a real receiver and a real server."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.records import (
    Boundary,
    Failure,
    Interaction,
    InteractionStatus,
    Trajectory,
)
from agentrl_cli.train.monitor.loggers import background_logger
from agentrl_cli.train.monitor.loggers.logger_building import build_loggers, check_loggers
from agentrl_cli.train.monitor.trajectory_spans import build_spans, choose_spread

START = 1_700_000_000.0


def ask(*names: str) -> dict[str, Any]:
    calls = [{"id": name, "function": {"name": name, "arguments": '{"x": 1}'}} for name in names]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def call(name: str, at: float, seconds: float, **fields: Any) -> Interaction:
    return Interaction(
        id=name, started=int(at * 10), started_at=START + at, seconds=seconds, **fields
    )


QUESTION = {"role": "user", "content": "secret question"}


def make_nested() -> Trajectory:
    """A main agent that asks a sub-agent, which asks a calculator; then a call that fails."""
    to_sub, to_tool = ask("solver"), ask("calculate")
    sub_question = {"role": "user", "content": "17*23 \ud83d"}
    result = {"role": "tool", "tool_call_id": "calculate", "content": "391"}
    answer = {"role": "tool", "tool_call_id": "solver", "content": "It is 391."}
    return Trajectory(
        id="000004.001/0",
        group_id="000004.001",
        task_id="7",
        step=4,
        agent_name="main",
        interactions=(
            call("m1", 0.0, 1.0, messages=(QUESTION,), reply=to_sub, finish_reason="tool_calls"),
            call("s1", 1.5, 1.0, messages=(sub_question,), reply=to_tool, prompt_ids=(1, 2)),
            call(
                "s2",
                3.0,
                1.0,
                parent_id="s1",
                messages=(sub_question, to_tool, result),
                reply={"role": "assistant", "content": "391"},
            ),
            call(
                "m2",
                5.0,
                1.0,
                parent_id="m1",
                messages=(QUESTION, to_sub, answer),
                reply={"role": "assistant", "content": "391."},
                completion_ids=(1, 2, 3),
                versions=(3, 3, 4),
                finish_reason="stop",
            ),
            call("f", 6.5, 0.5, status=InteractionStatus.FAILED, error="the engine died"),
        ),
        reward=0.5,
        reward_parts={"exact": 1.0, "format": math.nan},
        failure=Failure(boundary=Boundary.ENGINE, kind="EngineError", message="it died"),
        seconds=8.0,
        reward_seconds=0.5,
    )


def make_simple(index: int, reward: float | None) -> Trajectory:
    interaction = call("c", 0.0, 1.0, messages=(QUESTION,))
    return Trajectory(
        id=f"000001.000/{index}",
        group_id="000001.000",
        task_id="0",
        interactions=(interaction,),
        reward=reward,
    )


def test_tools_last_from_the_reply_to_the_next_call_and_sub_agents_belong_to_theirs() -> None:
    spans = {}
    for span in build_spans(make_nested(), "m", with_content=False):
        name = span.attributes.get("gen_ai.response.id") or span.name
        parent = span.parent
        assert parent is None or id(parent) in {id(s) for s, *_ in spans.values()}
        times = (span.start_ns / 1e9 - START, span.end_ns / 1e9 - START)
        owner = None if parent is None else parent.name
        spans[name] = (span, owner, times)
    shown = {name: (owner, times) for name, (_, owner, times) in spans.items()}
    assert shown == {
        "invoke_agent main": (None, (0.0, 8.0)),
        "m1": ("invoke_agent main", (0.0, 1.0)),
        "execute_tool solver": ("invoke_agent main", (1.0, 5.0)),
        "s1": ("execute_tool solver", (1.5, 2.5)),
        "execute_tool calculate": ("execute_tool solver", (2.5, 3.0)),
        "s2": ("execute_tool solver", (3.0, 4.0)),
        "m2": ("invoke_agent main", (5.0, 6.0)),
        "f": ("invoke_agent main", (6.5, 7.0)),
        "reward": ("invoke_agent main", (7.5, 8.0)),
    }
    assert build_spans(Trajectory(id="a", group_id="a", task_id="0"), "m", with_content=True) == []


def test_those_that_are_sent_reach_from_the_lowest_reward_to_the_highest() -> None:
    rewards = [0.5, 1.0, None, 0.25, 0.75]
    trajectories = [make_simple(n, reward) for n, reward in enumerate(rewards)]
    assert [t.reward for t in choose_spread(trajectories, 3)] == [None, 0.5, 1.0]
    assert choose_spread(trajectories, 5) == trajectories
    assert choose_spread(trajectories, 0) == []


class Collector:
    """An OTLP/HTTP receiver, which keeps the spans that it gets."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.key: str | None = None
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_known = collector.key is None or self.headers.get("x-key") == collector.key
                status = 200 if is_known and self.path == "/v1/traces" else 401
                if status == 200:
                    request = ExportTraceServiceRequest.FromString(body)
                    for group in request.resource_spans:
                        collector.resources.append(group.resource)
                        collector.spans += [s for scope in group.scope_spans for s in scope.spans]
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


def build_config(**logger: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "model": {"path": "some/model"},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "agent_builder_kwargs": {"api_key": "sk-very-secret-1234"},
            "loggers": [logger],
        }
    )


def send(path: Path, config: ExperimentConfig, *trajectories: Trajectory, step: int = 4) -> None:
    folder: Any = SimpleNamespace(path=path, location=str(path), push=print)
    said: list[str] = []
    with ExitStack() as stack:
        [logger] = build_loggers(config, folder, stack, said.append)
        metrics = {"step": float(step), "reward_mean": 0.5, "reward_part_a:b": 0.25}
        logger.log(step, metrics)
        logger.log(step, {"eval_mean_reward": 0.75})
        logger.log_trajectories(step, trajectories)
    assert said == []


def read_attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_a_collector_gets_the_spans_of_a_trajectory(collector: Collector, tmp_path: Path) -> None:
    config = build_config(kind="otlp", url=collector.url)
    check_loggers(config)
    assert collector.spans == []
    send(tmp_path, config, make_nested())
    names = {span.span_id: span.name for span in collector.spans}
    owners = [(span.name, names.get(span.parent_span_id)) for span in collector.spans]
    assert owners[0] == ("invoke_agent main", None)
    assert ("chat some/model", "execute_tool solver") in owners
    assert ("execute_tool calculate", "execute_tool solver") in owners
    assert len({span.trace_id for span in collector.spans}) == 1
    root = collector.spans[0]
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (
        int(START * 1e9),
        int((START + 8.0) * 1e9),
    )
    assert (root.status.code, root.status.message) == (2, "EngineError: it died")
    known = read_attributes(root)
    assert known["gen_ai.operation.name"] == "invoke_agent"
    assert (known["agentrl.reward"], known["agentrl.reward.exact"]) == (0.5, 1.0)
    chats = [read_attributes(s) for s in collector.spans if s.name == "chat some/model"]
    [last] = [chat for chat in chats if chat["gen_ai.response.id"] == "m2"]
    assert last["gen_ai.request.model"] == "some/model"
    assert last["gen_ai.usage.output_tokens"] == 3
    assert [v.string_value for v in last["gen_ai.response.finish_reasons"].values] == ["stop"]
    assert "secret question" not in str(collector.spans)
    service = {a.key: a.value.string_value for a in collector.resources[-1].attributes}
    assert service["service.name"] == "agentrl"
    # A step that is done again gives the same traces.
    before = {(span.trace_id, span.span_id) for span in collector.spans}
    send(tmp_path, config, make_nested())
    assert {(span.trace_id, span.span_id) for span in collector.spans} == before


def test_a_collector_gets_content_where_that_is_asked_for(
    collector: Collector, tmp_path: Path
) -> None:
    send(
        tmp_path, build_config(kind="otlp", url=collector.url, capture_content=True), make_nested()
    )
    known = [read_attributes(span) for span in collector.spans]
    [first] = [a for a in known if a.get("gen_ai.response.id") == "m1"]
    assert json.loads(first["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "secret question"}]}
    ]
    [reply] = json.loads(first["gen_ai.output.messages"])
    assert (reply["parts"][0]["type"], reply["parts"][0]["name"]) == ("tool_call", "solver")
    [tool] = [a for a in known if a.get("gen_ai.tool.name") == "calculate"]
    assert tool["gen_ai.tool.call.arguments"] == '{"x": 1}'
    assert tool["gen_ai.tool.call.result"] == "391"


def test_a_collector_that_wants_a_key_says_so_at_the_start(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.key = "k1"
    config = build_config(kind="otlp", url=collector.url)
    with pytest.raises(UserInputError, match=r"401.*OTEL_EXPORTER_OTLP_HEADERS"):
        check_loggers(config)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=k1")
    check_loggers(config)


@pytest.fixture
def mlflow_url(tmp_path: Path) -> Iterator[str]:
    """A real MLflow server with SQLite."""
    pytest.importorskip("mlflow.server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    command += ["--default-artifact-root", str(tmp_path / "artifacts")]
    with (tmp_path / "server.log").open("w") as log:
        # What runs jobs would take half of the start.
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        server = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=tmp_path,
            env=environment,
            start_new_session=True,
        )
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=30).close()
                break
            except OSError:
                assert server.poll() is None, (tmp_path / "server.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.5)
        try:
            yield url
        finally:
            # Its workers too.
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
def test_mlflow_finds_a_trajectory_by_its_reward(
    mlflow_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow

    # The server shares this machine with the other tests.
    monkeypatch.setattr(background_logger, "_CLOSE_SECONDS", 150.0)
    config = build_config(kind="mlflow", url=mlflow_url, capture_content=True)
    check_loggers(config)
    low = make_simple(0, 0.0)
    send(tmp_path, config, make_nested(), low)
    # Resumed: the same run, and what is done again is not there twice.
    send(tmp_path, config, make_nested(), low)
    send(tmp_path, config, make_simple(1, None), step=5)
    client = mlflow.MlflowClient(mlflow_url)
    experiment = client.get_experiment_by_name("exp").experiment_id
    [run] = client.search_runs([experiment], "metrics.reward_mean > 0.4")
    assert run.info.status == "FINISHED"
    assert run.data.params["experiment_name"] == "exp"
    assert run.data.params["agent_builder_kwargs.api_key"] == "***"
    assert run.data.metrics["reward_part_a_b"] == 0.25
    steps = [m.step for m in client.get_metric_history(run.info.run_id, "eval_mean_reward")]
    assert steps == [4, 4, 5]

    def search(condition: str | None) -> list[Any]:
        found = client.search_traces(locations=[experiment], filter_string=condition)
        return sorted(found, key=lambda trace: trace.info.tags["trajectory"])

    assert [t.info.tags["trajectory"] for t in search(None)] == [
        *("000001.000/0", "000001.000/1", "000004.001/0")
    ]
    [nested] = search("feedback.reward > 0.4")
    assert [t.info.trace_id for t in search("tags.reward = '0.5'")] == [nested.info.trace_id]
    assert nested.info.tags["failure"] == "engine"
    spans = {span.name: span for span in nested.data.spans}
    owner = spans["execute_tool solver"]
    assert spans["execute_tool calculate"].parent_id == owner.span_id
    assert owner.parent_id == spans["invoke_agent main"].span_id
    assert spans["invoke_agent main"].start_time_ns == int(START * 1e9)
    [first] = [s for s in nested.data.spans if s.attributes.get("gen_ai.response.id") == "m1"]
    assert first.inputs["messages"][0]["content"] == "secret question"
