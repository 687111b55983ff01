"""What a trainer says arrives, whatever becomes of the pipe, the reader or the trainer."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest

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
from agentrl_cli.launch.processes.trainer_events import (
    TrainerEventReader,
    TrainerEventWriter,
    TrainerReport,
)


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_stage(self, stage, total=None) -> None:
        self.events.append(("stage", stage, total))

    def on_progress(self, num_done, note="") -> None:
        self.events.append(("progress", num_done, note))

    def on_step(self, metrics) -> None:
        self.events.append(("step", metrics))

    def on_message(self, text) -> None:
        self.events.append(("message", text))


def test_every_event_arrives_in_order() -> None:
    reading, writing = os.pipe()
    shown = Recorder()
    reader, writer = TrainerEventReader(reading, shown), TrainerEventWriter(writing)
    writer.on_stage("rollout", 8)
    writer.on_progress(3, "of a kind")
    writer.on_step({"step": 1, "reward_mean": math.nan, "loss": 0.25})
    writer.on_message("zwei\nZeilen — ü")
    writer.report(TrainerReport(is_complete=True))
    os.close(writing)
    assert reader.finish() == TrainerReport(is_complete=True)
    stage, progress, (name, metrics), message = shown.events
    assert (stage, progress) == (("stage", "rollout", 8), ("progress", 3, "of a kind"))
    assert (name, metrics["step"], metrics["loss"]) == ("step", 1, 0.25)
    assert math.isnan(metrics["reward_mean"])
    assert message == ("message", "zwei\nZeilen — ü")
    assert (reader.is_stepping, reader.num_steps) == (True, 1)


def test_a_killed_trainer_leaves_half_a_line_and_no_report() -> None:
    reading, writing = os.pipe()
    shown = Recorder()
    reader = TrainerEventReader(reading, shown)
    os.write(writing, b'{"event": "message", "text": "whole"}\n{"event": "mess')
    os.close(writing)
    assert reader.finish() == TrainerReport()
    assert shown.events == [("message", "whole")]


def test_a_pipe_that_something_left_behind_holds_open_is_not_waited_for() -> None:
    reading, writing = os.pipe()
    reader = TrainerEventReader(reading, Recorder())
    try:
        os.write(writing, b'{"event": "message", "text": "hello"}\n')
        started = time.monotonic()
        assert reader.finish(timeout_seconds=0.3) == TrainerReport()
        assert time.monotonic() - started < 3
    finally:
        os.close(writing)


def test_a_display_that_fails_does_not_cost_the_last_word() -> None:
    class Broken(Recorder):
        def on_step(self, metrics) -> None:
            raise BrokenPipeError("the terminal has gone")

    reading, writing = os.pipe()
    reader, writer = TrainerEventReader(reading, Broken()), TrainerEventWriter(writing)
    writer.on_step({"step": 1})
    writer.report(TrainerReport(is_complete=False))
    os.close(writing)
    assert reader.finish().is_complete is False


def test_a_reader_that_has_gone_costs_the_trainer_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = TrainerEventWriter(writing)
    for number in range(3000):
        writer.on_message(f"nobody reads {number}")
    writer.report(TrainerReport(is_complete=True))
    os.close(writing)


def test_a_reader_that_hangs_holds_progress_back_not_the_trainer() -> None:
    reading, writing = os.pipe()
    writer = TrainerEventWriter(writing)
    started = time.monotonic()
    for number in range(20_000):
        writer.on_progress(number, "x" * 100)
    assert time.monotonic() - started < 5
    shown = Recorder()
    reader = TrainerEventReader(reading, shown)
    writer.report(TrainerReport(is_complete=True))
    os.close(writing)
    assert reader.finish().is_complete is True
    assert 0 < len(shown.events) < 20_000


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
    error: AgentrlError, rebuilt_as: type[AgentrlError]
) -> None:
    reading, writing = os.pipe()
    reader, writer = TrainerEventReader(reading, Recorder()), TrainerEventWriter(writing)
    writer.report(TrainerReport(error=error))
    os.close(writing)
    rebuilt = reader.finish().error
    assert type(rebuilt) is rebuilt_as
    assert (str(rebuilt), rebuilt.exit_code) == (str(error), error.exit_code)


@pytest.mark.parametrize(
    ("name", "exit_code", "expected"),
    [
        ("MyOwnError", 2, UserInputError),
        ("MyOwnError", 1, RunError),
        ("format_nearest", 1, RunError),
        ("os", 2, UserInputError),
    ],
)
def test_a_class_that_is_not_ours_is_never_looked_up_elsewhere(name, exit_code, expected) -> None:
    error = build_error(name, "text", exit_code)
    assert type(error) is expected
    assert error.exit_code == exit_code
