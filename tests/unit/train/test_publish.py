"""Publishing: an engine that lies about its weights stops the run."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl_cli.engine.protocol import Generation, Probe, Sampling
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError, WeightMismatchError
from agentrl_cli.train.publish import publish_and_verify


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

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        if self.generate_error is not None:
            raise self.generate_error
        likely = tuple(zip((40, 41), self.logprobs, strict=False))
        return Generation(
            completion_ids=(40,),
            rollout_logprobs=(-1.0,),
            versions=(self.version + self.sampled_version_offset,),
            finish_reason="length",
            top_logprobs=(likely,) if likely else (),
        )


class FaultyEngine:
    """Several replicas; what it is told to expect is kept for the test."""

    def __init__(self, *replicas: FaultyReplica) -> None:
        self.replicas = replicas
        self.expected: list[tuple[int, Sequence[Probe]]] = []

    async def publish_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        assert weights == {"w": 1}
        for replica in self.replicas:
            replica.version = version

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        self.expected.append((version, probes))


class FixedLearner:
    """Says -1 and -2 of tokens 40 and 41, and rounds by ``rounding``."""

    def __init__(self, rounding: float = 0.0) -> None:
        self.rounding = rounding

    def weights(self) -> Mapping[str, Any]:
        return {"w": 1}

    def score_probes(self, prompts: Any, candidates: Any) -> Any:
        own = {40: -1.0, 41: -2.0}
        scored = [[[own[token] for token in ids] for ids in one] for one in candidates]
        return scored, [[x + self.rounding for x in row] for row in scored[0]]


async def publish(
    *replicas: FaultyReplica,
    engine: Any = None,
    learner: Any = None,
    tolerance: float | None = 1e-3,
) -> dict[str, float]:
    engine = engine or FaultyEngine(*replicas)
    return await publish_and_verify(
        engine, learner or FixedLearner(), 7, [[1, 2, 3], [4]], tolerance
    )


async def test_rollouts_may_use_weights_as_soon_as_a_replica_has_sampled_with_them() -> None:
    served = threading.Event()

    class Scoring(FixedLearner):
        def score_probes(self, prompts: Any, candidates: Any) -> Any:
            assert served.wait(5.0), "the trainer's own numbers were waited for"
            return super().score_probes(prompts, candidates)

    engine = FaultyEngine(FaultyReplica())
    await publish_and_verify(engine, Scoring(), 7, [[1]], 1e-3, on_served=served.set)
    assert served.is_set()


async def test_agents_go_on_while_weights_are_gathered_from_other_processes() -> None:
    gathered = threading.Event()

    class Gathering(FixedLearner):
        def weights(self) -> Mapping[str, Any]:
            assert gathered.wait(5.0), "the loop stood still"
            return super().weights()

    asyncio.get_running_loop().call_later(0.1, gathered.set)
    await publish(FaultyReplica(), learner=Gathering())


async def test_honest_replicas_pass_and_what_they_must_show_later_is_kept():
    engine = FaultyEngine(FaultyReplica(logprobs=(-1.0, -2.0004)), FaultyReplica("vllm-1"))
    metrics = await publish(engine=engine)
    assert metrics["probe_gap_max"] == pytest.approx(4e-4)
    share = math.exp(-2.0) / (math.exp(-1.0) + math.exp(-2.0))
    assert metrics["probe_gap_mean"] == pytest.approx(4e-4 * share, rel=1e-3)
    assert metrics.keys() >= {"publish_seconds", "probe_seconds"}
    # One step of the engine, whatever else it does.
    assert {s.max_tokens for replica in engine.replicas for s in replica.samplings} == {1}
    probes = [
        Probe(prompt_ids=prompt, logprobs=((40, -1.0), (41, -2.0)), tolerance=1e-3)
        for prompt in ((1, 2, 3), (4,))
    ]
    assert engine.expected == [(7, probes)]


async def test_what_is_allowed_follows_from_the_trainers_own_rounding():
    far = FaultyReplica(logprobs=(-1.05, -2.05))
    metrics = await publish(far, learner=FixedLearner(rounding=0.02), tolerance=None)
    assert metrics["probe_tolerance"] == pytest.approx(0.1)
    assert metrics["probe_rounding_mean"] == pytest.approx(0.02)
    with pytest.raises(WeightMismatchError, match=r"5\.00e-02 nats apart; allowed 1\.00e-03"):
        await publish(far, tolerance=None)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ({"version_offset": -1}, WeightMismatchError, "version 7 was published.*vllm-1 reports 6"),
        (
            {"sampled_version_offset": -2},
            WeightMismatchError,
            "vllm-1 sampled after probe prompt 0 with version 5",
        ),
        ({"logprobs": (-9.0, math.nan)}, WeightMismatchError, "engine logprob nan"),
        ({"logprobs": ()}, WeightMismatchError, "vllm-1 sampled no token"),
        ({"generate_error": EngineTimeoutError("too late")}, EngineTimeoutError, "too late"),
    ],
)
async def test_a_replica_that_does_not_prove_its_weights_stops_the_run(fault, error, message):
    with pytest.raises(error, match=message):
        await publish(FaultyReplica(), FaultyReplica("vllm-1", **fault))


async def test_one_replica_with_other_logprobs_stops_the_run_with_both_numbers():
    faulty = FaultyReplica("vllm-1", logprobs=(-1.002, -2.02))
    engine = FaultyEngine(FaultyReplica(), faulty)
    with pytest.raises(WeightMismatchError) as caught:
        await publish(engine=engine)
    message = str(caught.value)
    assert "vllm-1 does not hold" in message
    assert "token 41: engine logprob -2.020000, trainer -2.000000" in message
    assert "type train.probe_tolerance=0." in message
    assert "type the same command again" in message
    assert engine.expected == []
    await publish(faulty, tolerance=1.01)


@pytest.mark.parametrize("place", ["version_error", "generate_error"])
async def test_a_replica_that_dies_is_passed_over_while_another_can_be_checked(place):
    dead = FaultyReplica("vllm-1", **{place: ServerDownError("connection refused")})
    engine = FaultyEngine(dead, FaultyReplica())
    await publish(engine=engine)
    assert [version for version, _ in engine.expected] == [7]
    with pytest.raises(EngineError, match=r"version 7 cannot be verified.*connection refused"):
        await publish(dead)
    with pytest.raises(EngineError, match="none of its servers is healthy"):
        await publish()


async def test_weights_that_no_server_could_show_are_published_again():
    class Recovering(FaultyEngine):
        num_published = 0

        async def publish_weights(self, version: int, weights: Mapping[str, Any]) -> None:
            await super().publish_weights(version, weights)
            self.num_published += 1
            slow = ServerDownError("no health answer within 30 s")
            self.replicas[0].version_error = slow if self.num_published < 4 else None

    engine = Recovering(FaultyReplica())
    await publish(engine=engine)
    assert (engine.num_published, [version for version, _ in engine.expected]) == (4, [7])
