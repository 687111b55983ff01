"""The time of steps, on a clock that is set by hand."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from agentrl_cli.train.monitor.step_clock import StepClock, describe_time


class Hands:
    """What ``time`` tells."""

    now = 100.0


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(time, "perf_counter", lambda: hands.now)
    monkeypatch.setattr(time, "time", lambda: 1e9 + hands.now)
    return hands


def spend(clock: StepClock, hands: Hands, **phases: float) -> None:
    for name, seconds in phases.items():
        with clock.phase(name):
            hands.now += seconds


def test_a_step_is_its_phases_and_a_pause_is_no_part_of_it(hands: Hands):
    seen: list[Any] = []
    clock = StepClock(lambda *phase: seen.append(phase))
    spend(clock, hands, evaluation=7.0)
    hands.now += 50.0
    clock.begin_step()
    spend(clock, hands, rollout=4.0, store=1.0, train=2.0)
    hands.now += 0.5
    first = clock.end_step()
    assert first == {
        "rollout_seconds": 4.0, "store_seconds": 1.0, "engine_memory_seconds": 0.0,
        "evaluation_seconds": 7.0, "save_seconds": 0.0, "step_seconds": 7.5,
    }  # fmt: skip
    # What comes after the metrics of a step are made is a part of the next one.
    spend(clock, hands, store=0.25, evaluation=3.0, save=2.0)
    clock.begin_step()
    spend(clock, hands, rollout=1.0)
    second = clock.end_step()
    assert second["step_seconds"] == 1.25
    assert (second["store_seconds"], second["rollout_seconds"]) == (0.25, 1.0)
    assert (second["evaluation_seconds"], second["save_seconds"]) == (3.0, 2.0)
    assert seen[:2] == [("evaluation", 1e9 + 100.0, 7.0), ("rollout", 1e9 + 157.0, 4.0)]


def test_a_phase_that_fails_has_taken_its_time(hands: Hands):
    clock = StepClock()
    clock.begin_step()
    with suppress(KeyError), clock.phase("rollout"):
        hands.now += 2.0
        raise KeyError
    assert clock.end_step()["rollout_seconds"] == 2.0


def test_where_the_time_went_in_sentences():
    line = {
        "step_seconds": 10.0, "rollout_seconds": 6.0, "train_seconds": 2.0, "store_seconds": 0.0,
        "publish_seconds": 1.0, "evaluation_seconds": 10.0,
        "model_seconds": 30.0, "agent_seconds": 10.0, "reward_seconds": 0.0,
    }  # fmt: skip
    assert describe_time([line, line]) == [
        "time to the end of the last step, 40 s:  evaluations 50 %, waiting for trajectories 30 %, "
        "update 10 %, publication 5 %, other 5 %",
        "time of its trajectories, 80 s:  model calls 75 %, tools and agent code 25 %",
    ]
    assert describe_time([]) == []
