"""What crosses between command and trainer arrives, whatever becomes of pipe, reader or trainer."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import (
    AgentrlError,
    ContextLengthError,
    DatasetError,
    EngineError,
    RolloutFailedError,
    RunError,
    UserInputError,
    WeightMismatchError,
    build_error,
)
from agentrl_cli.launch.processes.trainer_protocol import (
    RunningServers,
    TrainerEventReader,
    TrainerEventWriter,
    TrainerReport,
    TrainerSpec,
)
from agentrl_cli.store.working_copy import FolderOwner
from agentrl_cli.train.rendezvous import Rendezvous


@pytest.fixture
def spec(make_config: Callable[..., Any]) -> TrainerSpec:
    endpoint = ServerEndpoint(
        name="vllm-0", base_url="http://127.0.0.1:8940", api_key="secret-1", log_path="x.log"
    )
    run = resolve_run(make_config(), Machine(gpu_ids=("0", "1")), purpose="train")
    return TrainerSpec(
        owner=FolderOwner(7, "s3://bucket/run", "lease", "/tmp/copy"),
        servers=RunningServers(run=run, endpoints=(endpoint,)),
        secrets=[["agent_builder_kwargs", "keys", 0, "secret-2"]],
        rendezvous="file:///tmp/ranks/rendezvous",
    )


def test_a_spec_arrives_and_does_not_stay_in_the_environment(spec: TrainerSpec) -> None:
    environment = {"HOME": "/home/x", **spec.environment()}
    assert "secret-1" in "".join(environment.values())
    assert TrainerSpec.take(environment) == (spec, None)
    assert environment == {"HOME": "/home/x"}
    assert "secret-1" not in repr(spec.servers)


def test_several_ranks_are_told_apart_as_torchrun_does(spec: TrainerSpec) -> None:
    environment = spec.environment(rank=2, world_size=4)
    assert environment.items() >= {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items()
    _, rendezvous = TrainerSpec.take(environment)
    assert rendezvous == Rendezvous(index=2, count=4, address=spec.rendezvous)
    assert environment == {}


def test_a_trainer_that_nobody_started_says_what_to_type() -> None:
    with pytest.raises(UserInputError, match="agentrl train --config"):
        TrainerSpec.take({})


class Recorder:
    """An observer that keeps every event; ``steps_fail`` stands for a terminal that has gone."""

    steps_fail = False

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_stage(self, stage, total=None) -> None:
        self.events.append(("stage", stage, total))

    def on_progress(self, num_done, note="") -> None:
        self.events.append(("progress", num_done, note))

    def on_step(self, metrics) -> None:
        if self.steps_fail:
            raise BrokenPipeError
        self.events.append(("step", metrics))

    def on_message(self, text) -> None:
        self.events.append(("message", text))


class Pipe:
    """Both ends, with an observer behind the reader, which begins to read when it is asked to."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()
        self.shown = Recorder()
        self.writer = TrainerEventWriter(self.writing)

    def read(self) -> TrainerEventReader:
        return TrainerEventReader(self.reading, self.shown)

    def finish(self) -> TrainerReport:
        reader = self.read()
        os.close(self.writing)
        return reader.finish()


@pytest.fixture
def pipe() -> Pipe:
    return Pipe()


def test_every_event_arrives_in_order(pipe: Pipe) -> None:
    reader = pipe.read()
    pipe.writer.on_stage("rollout", 8)
    pipe.writer.on_progress(3, "of a kind")
    pipe.writer.on_step({"step": 1, "reward_mean": math.nan, "loss": 0.25})
    pipe.writer.on_message("zwei\nZeilen — ü" + "x" * 300_000)
    pipe.writer.report(TrainerReport(is_complete=True))
    os.close(pipe.writing)
    assert reader.finish() == TrainerReport(is_complete=True)
    stage, progress, (name, metrics), message = pipe.shown.events
    assert (stage, progress) == (("stage", "rollout", 8), ("progress", 3, "of a kind"))
    assert (name, metrics["step"], metrics["loss"]) == ("step", 1, 0.25)
    assert math.isnan(metrics["reward_mean"])
    assert message == ("message", "zwei\nZeilen — ü" + "x" * 300_000), "more than a pipe holds"
    assert (reader.is_stepping, reader.num_steps) == (True, 1)


def test_a_killed_trainer_leaves_half_a_line_and_no_report(pipe: Pipe) -> None:
    pipe.writer.on_message("whole")
    os.write(pipe.writing, b'["on_mess')
    assert pipe.finish() == TrainerReport()
    assert pipe.shown.events == [("message", "whole")]


def test_a_pipe_that_something_left_behind_holds_open_is_not_waited_for(pipe: Pipe) -> None:
    reader = pipe.read()
    started = time.monotonic()
    assert reader.finish(timeout_seconds=0.3) == TrainerReport()
    assert time.monotonic() - started < 3
    os.close(pipe.writing)
    reader.finish()


def test_a_display_that_fails_does_not_cost_the_last_word(pipe: Pipe) -> None:
    pipe.shown.steps_fail = True
    pipe.writer.on_step({"step": 1})
    pipe.writer.report(TrainerReport(is_complete=False))
    assert pipe.finish().is_complete is False


def test_a_reader_that_has_gone_costs_the_trainer_nothing(pipe: Pipe) -> None:
    os.close(pipe.reading)
    for number in range(3000):
        pipe.writer.on_message(f"nobody reads {number}")
    pipe.writer.report(TrainerReport(is_complete=True))
    os.close(pipe.writing)


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_reader_that_hangs_holds_progress_back_not_the_trainer(pipe: Pipe, size: int) -> None:
    started = time.monotonic()
    for number in range(2_000):
        pipe.writer.on_progress(number, "x" * size)
    assert time.monotonic() - started < 5
    reader = pipe.read()
    pipe.writer.report(TrainerReport(is_complete=True))
    os.close(pipe.writing)
    assert reader.finish().is_complete is True
    assert 0 < len(pipe.shown.events) < 2_000
    assert all(len(note) == size for _, _, note in pipe.shown.events)


@pytest.mark.parametrize(
    ("error", "rebuilt_as"),
    [
        (DatasetError("row 3"), DatasetError),
        (WeightMismatchError("two numbers"), WeightMismatchError),
        # These two need more than a message: the nearest class above stands for them.
        (ContextLengthError(600, 512), EngineError),
        (RolloutFailedError("all failed", []), RunError),
    ],
)
def test_an_error_comes_back_with_message_and_exit_code(
    error: AgentrlError, rebuilt_as: type[AgentrlError], pipe: Pipe
) -> None:
    pipe.writer.report(TrainerReport(error=error))
    rebuilt = pipe.finish().error
    assert type(rebuilt) is rebuilt_as
    assert (str(rebuilt), rebuilt.exit_code) == (str(error), error.exit_code)


@pytest.mark.parametrize(
    ("name", "exit_code", "expected"),
    [("MyOwnError", 2, UserInputError), ("format_nearest", 1, RunError), ("os", 2, UserInputError)],
)
def test_a_class_that_is_not_ours_is_never_looked_up_elsewhere(name, exit_code, expected) -> None:
    error = build_error(name, "text", exit_code)
    assert type(error) is expected
    assert error.exit_code == exit_code
