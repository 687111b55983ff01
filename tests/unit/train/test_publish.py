"""Publishing: an engine that lies about its weights stops the run."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, Probe, Sampling
from agentrl_cli.errors import (
    EngineError,
    EngineTimeoutError,
    ServerDownError,
    WeightMismatchError,
)
from agentrl_cli.train.publish import publish_and_verify, resolve_probe_tolerance


@dataclass
class FaultyReplica:
    """Holds weights well unless told which fault to show."""

    name: str = "vllm-0"
    version_offset: int = 0
    sampled_version_offset: int = 0
    logprobs: tuple[float, ...] = (-1.0, -2.0)
    version_error: Exception | None = None
    generate_error: Exception | None = None
    version: int = 0
    samplings: list[Sampling] = field(default_factory=list)

    async def policy_version(self) -> int:
        if self.version_error is not None:
            raise self.version_error
        return self.version + self.version_offset

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        if self.generate_error is not None:
            raise self.generate_error
        return Generation(
            completion_ids=(40, 41)[: len(self.logprobs)],
            rollout_logprobs=self.logprobs,
            versions=(self.version + self.sampled_version_offset,) * len(self.logprobs),
            finish_reason="length",
        )


@dataclass
class FaultyEngine:
    """Several replicas; what it is told to expect is kept for the test."""

    replicas: Sequence[FaultyReplica]
    publish_error: Exception | None = None
    expected: list[tuple[int, Sequence[Probe]]] = field(default_factory=list)

    async def publish_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        if self.publish_error is not None:
            raise self.publish_error
        assert weights == {"w": 1}
        for replica in self.replicas:
            replica.version = version

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        self.expected.append((version, probes))


class FixedLearner:
    """Says -1 and -2 of the two tokens after each prompt."""

    def weights(self) -> Mapping[str, Any]:
        return {"w": 1}

    def compute_logprobs(
        self,
        token_id_lists: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] | None = None,
    ) -> list[list[float]]:
        assert starts is not None
        return [
            [-1.0, -2.0][: len(ids) - start]
            for ids, start in zip(token_id_lists, starts, strict=True)
        ]


async def publish(*replicas: FaultyReplica, tolerance: float = 1e-3) -> dict[str, float]:
    return await publish_on(FaultyEngine(replicas), tolerance)


async def publish_on(engine: FaultyEngine, tolerance: float = 1e-3) -> dict[str, float]:
    return await publish_and_verify(
        engine,  # type: ignore[arg-type]
        FixedLearner(),
        7,
        [[1, 2, 3], [4]],
        tolerance,
    )


async def test_agents_go_on_while_weights_are_gathered_from_other_processes() -> None:
    gathered = threading.Event()

    class Gathering(FixedLearner):
        def weights(self) -> Mapping[str, Any]:
            assert gathered.wait(5.0), "the loop stood still"
            return super().weights()

    asyncio.get_running_loop().call_later(0.1, gathered.set)
    engine: Any = FaultyEngine([FaultyReplica()])
    await publish_and_verify(engine, Gathering(), 7, [[1, 2, 3]], 1e-3)
    assert engine.expected


async def test_honest_replicas_pass_and_what_they_must_show_later_is_kept():
    engine = FaultyEngine([FaultyReplica(logprobs=(-1.0, -2.0004)), FaultyReplica("vllm-1")])
    metrics = await publish_on(engine)
    assert metrics["probe_gap_max"] == pytest.approx(4e-4)
    assert metrics["probe_gap_mean"] == pytest.approx(1e-4)
    assert metrics.keys() == {
        "publish_seconds", "probe_seconds", "probe_gap_mean", "probe_gap_max",
    }  # fmt: skip
    for replica in engine.replicas:
        assert [s.seed for s in replica.samplings] == [0, 1]
    probes = [
        Probe(
            token_ids=(*prompt, 40, 41),
            num_prompt_tokens=len(prompt),
            logprobs=(-1.0, -2.0),
            tolerance=1e-3,
        )
        for prompt in ([1, 2, 3], [4])
    ]
    assert engine.expected == [(7, probes)]


async def test_another_version_stops_the_run():
    with pytest.raises(WeightMismatchError, match=r"version 7 was published.*vllm-1 reports 6"):
        await publish(FaultyReplica(), FaultyReplica("vllm-1", version_offset=-1))
    with pytest.raises(WeightMismatchError, match="vllm-0 sampled probe 0 with version 5"):
        await publish(FaultyReplica(sampled_version_offset=-2))


async def test_one_replica_with_other_logprobs_stops_the_run_with_both_numbers():
    faulty = FaultyReplica("vllm-1", logprobs=(-1.002, -3.0))
    engine = FaultyEngine([FaultyReplica(), faulty])
    with pytest.raises(WeightMismatchError) as caught:
        await publish_on(engine)
    message = str(caught.value)
    assert "vllm-1 does not hold" in message
    assert "completion token 1 (id 41): engine logprob -3.000000, trainer -2.000000" in message
    assert "train.probe_tolerance=2" in message
    assert "type the same command again" in message
    assert engine.expected == []
    await publish(faulty, tolerance=1.01)


async def test_nan_does_not_pass():
    with pytest.raises(WeightMismatchError, match="engine logprob nan"):
        await publish(FaultyReplica(logprobs=(math.nan, -2.0)))
    with pytest.raises(WeightMismatchError, match="engine logprob nan"):
        await publish(FaultyReplica(logprobs=(-9.0, math.nan)))


async def test_a_replica_that_samples_nothing_proves_nothing():
    with pytest.raises(WeightMismatchError, match="vllm-1 sampled no token"):
        await publish(FaultyReplica(), FaultyReplica("vllm-1", logprobs=()))


@pytest.mark.parametrize("place", ["version_error", "generate_error"])
async def test_a_replica_that_dies_is_passed_over_while_another_can_be_checked(place):
    dead = FaultyReplica("vllm-1", **{place: ServerDownError("connection refused")})
    engine = FaultyEngine([dead, FaultyReplica()])
    await publish_on(engine)
    assert [version for version, _ in engine.expected] == [7]
    with pytest.raises(EngineError, match=r"version 7 cannot be verified.*connection refused"):
        await publish(dead)
    with pytest.raises(EngineError, match="none of its servers is up"):
        await publish()


async def test_the_engines_own_errors_come_through():
    with pytest.raises(EngineTimeoutError, match="too late"):
        await publish_on(
            FaultyEngine([FaultyReplica()], publish_error=EngineTimeoutError("too late"))
        )
    with pytest.raises(EngineTimeoutError, match="too late"):
        await publish(FaultyReplica(), FaultyReplica(generate_error=EngineTimeoutError("too late")))


async def test_no_probe_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="at least one probe"):
        await publish_and_verify(FaultyEngine([]), FixedLearner(), 7, [], 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [("float32", None, 1e-3), ("bfloat16", None, 0.1), ("bfloat16", 0.5, 0.5)],
)
def test_tolerance_by_dtype(dtype: str, given: float | None, expected: float):
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "t",
            "model": {"path": "none", "dtype": dtype},
            "workflow_path": "none.none",
            "train_dataset": {"path": "none"},
            "train": {"probe_tolerance": given},
        }
    )
    assert resolve_probe_tolerance(config) == expected
