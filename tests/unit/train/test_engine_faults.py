"""Running counts of an engine become those of each step."""

from __future__ import annotations

from typing import Any, cast

from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.train.engine_faults import EngineFaults


class FragileEngine:
    def __init__(self) -> None:
        self.fault_counts = {"failovers": 0, "server_outages": 0, "server_returns": 0}
        self.num_servers_out = 0


def watch(engine: Any) -> EngineFaults:
    return EngineFaults(cast(InferenceEngine, engine))


def test_each_step_has_its_own_faults() -> None:
    engine = FragileEngine()
    faults = watch(engine)
    assert faults.take() == {
        "failovers": 0.0, "server_outages": 0.0, "server_returns": 0.0, "num_servers_out": 0.0
    }  # fmt: skip
    engine.fault_counts = {"failovers": 7, "server_outages": 1, "server_returns": 0}
    engine.num_servers_out = 1
    assert faults.take()["failovers"] == 7.0
    engine.fault_counts = {"failovers": 9, "server_outages": 1, "server_returns": 1}
    assert faults.take() == {
        "failovers": 2.0, "server_outages": 0.0, "server_returns": 1.0, "num_servers_out": 1.0
    }  # fmt: skip


def test_an_engine_without_servers_has_none() -> None:
    assert watch(object()).take() == {}
