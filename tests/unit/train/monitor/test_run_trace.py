"""Traces keep the rules of the Trace Event Format, whatever trajectories do at the same time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.train.monitor import run_trace
from agentrl_cli.train.monitor.run_trace import RunTrace

NOW = 1.8e9


def call(start: float, seconds: float, *tools: Any) -> Interaction:
    reply = {"role": "assistant", "tool_calls": [{"function": {"name": t}} for t in tools]}
    return Interaction(id=f"c{start}", reply=reply, started_at=NOW + start, seconds=seconds)


def attempt(name: str, start: float, seconds: float, *calls: Interaction, **more: Any):
    return Trajectory(
        id=name, group_id="g", task_id="t", interactions=calls, started_at=NOW + start,
        seconds=seconds, **more,
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def show(path: Path, read_trace: Callable[[Path], Any]) -> Callable[..., list[Any]]:
    """Lane, name, start and duration of everything in a trace of some trajectories."""

    def write(*trajectories: Trajectory) -> list[Any]:
        trace = RunTrace(path)
        trace.add_trajectories(1, trajectories)
        trace.flush()
        return [
            (e["tid"], e["name"], e["ts"] / 1e6 - NOW, e["dur"] / 1e6)
            for e in read_trace(path)
            if e["ph"] == "X"
        ]

    return write


def test_a_trajectory_is_its_calls_its_tools_and_its_reward(show):
    judged = {"reward": 1.0, "reward_seconds": 1.0}
    shown = show(attempt("a/0", 0.0, 10.0, call(1.0, 2.0, "search"), call(5.0, 1.0), **judged))
    assert [(lane, name, *map(round, times)) for lane, name, *times in shown] == [
        (1, "trajectory a/0", 0, 10),
        (1, "agent", 0, 1),
        (1, "model call", 1, 2),
        (1, "tools: search", 3, 2),
        (1, "model call", 5, 1),
        (1, "agent", 6, 3),
        (1, "reward", 9, 1),
    ]


def test_what_happens_at_the_same_time_stands_in_lanes_of_its_own(show):
    shown = show(
        attempt("a/0", 0.0, 4.0, call(0.0, 3.0), call(1.0, 1.0)),
        attempt("b/0", 4.0, 1.0),
        attempt("c/0", 3.5, 1.0),
    )
    lanes = {name: lane for lane, name, *_ in shown}
    assert lanes["trajectory a/0"] == lanes["model call"] == lanes["trajectory b/0"] == 1
    assert lanes["model call, a/0"] == lanes["trajectory c/0"] == 2


def test_any_trajectories_make_a_trace_that_keeps_the_rules(show):
    """Calls of other clocks, of parallel agents, of no duration, outside of their trajectory."""
    chance = random.Random(1)
    trajectories = []
    for number in range(60):
        start, seconds = chance.uniform(0, 5), chance.choice([0.0, 1e-6, 0.3, 4.0])
        calls = [
            call(start + chance.uniform(-0.1, 1.1) * seconds, chance.choice([0.0, 0.1, seconds]))
            for _ in range(chance.randrange(4))
        ]
        judging = chance.uniform(0, 1.5) * seconds
        trajectories.append(attempt(f"{number}/0", start, seconds, *calls, reward_seconds=judging))
    shown = show(*trajectories)
    assert sum(name.startswith("trajectory ") for _, name, *_ in shown) == 60


def test_what_models_and_tools_say_cannot_break_it(show, path: Path):
    failure = Failure(boundary=Boundary.TOOL, kind="Bad\x1bError", message="")
    hostile = call(0.0, 1.0, "x\x1b[2J" + "y" * 500, "\ud800</script>", None, 7)
    broken = Interaction(
        id="d", reply={"tool_calls": [None, {"function": 3}]}, started_at=NOW + 1.5
    )
    shown = show(
        attempt("a/0", 0.0, 3.0, hostile, broken, failure=failure),
        attempt("b/0", 0.0, 3.0, reward=math.nan),
    )
    [tools] = {name for _, name, *_ in shown if name.startswith("tools: ")}
    assert len(tools) < 80
    assert "\x1b" not in path.read_text(encoding="ascii")


def test_it_can_be_read_after_every_step_and_ends_when_it_is_full(
    path: Path, read_trace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_trace, "MAX_BYTES", 4_000)
    path.write_text("of an earlier run" * 1000)
    trace = RunTrace(path)
    assert json.loads(path.read_bytes()) == []
    sizes = []
    for step in range(20):
        trace.add_phase("rollout", NOW + step, 1.0)
        trace.add_publication(step, NOW + step, {"publish_seconds": 0.1, "probe_seconds": 0.1})
        trace.add_trajectories(step, [attempt(f"{step}/0", step, 1.0, call(step, 1.0))])
        trace.flush()
        sizes.append(len(read_trace(path)))
    assert sizes[0] < sizes[1] < sizes[-1] == sizes[-2]
    assert 3_500 < path.stat().st_size <= 4_000
    assert path.stat().st_mode & 0o077 == 0


def test_a_disk_that_refuses_ends_the_trace_and_not_the_run(tmp_path: Path, caplog):
    trace = RunTrace(tmp_path / "no folder" / "trace.json")
    trace.add_phase("rollout", NOW, 1.0)
    trace.flush()
    assert "ends here" in caplog.text
