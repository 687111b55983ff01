"""Publishing: an engine that lies about its weights stops the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.errors import EngineTimeoutError, WeightMismatchError
from agentrl_cli.train.publish import publish_and_verify, resolve_probe_tolerance


@dataclass
class FaultyEngine:
    """Holds weights well unless told which fault to show."""

    version_offset: int = 0
    sampled_version_offset: int = 0
    logprobs: tuple[float, ...] = (-1.0, -2.0)
    publish_error: Exception | None = None
    version: int = 0
    samplings: list[Sampling] = field(default_factory=list)

    async def publish_weights(self, version: int, weights: Mapping[str, Any]) -> None:
        if self.publish_error is not None:
            raise self.publish_error
        assert weights == {"w": 1}
        self.version = version

    async def policy_version(self) -> int:
        return self.version + self.version_offset

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        self.samplings.append(sampling)
        await asyncio.sleep(0)
        return Generation(
            completion_ids=(40, 41)[: len(self.logprobs)],
            rollout_logprobs=self.logprobs,
            versions=(self.version + self.sampled_version_offset,) * len(self.logprobs),
            finish_reason="length",
        )


class FixedLearner:
    """Says -1 and -2 of the two tokens after each prompt."""

    def weights(self) -> Mapping[str, Any]:
        return {"w": 1}

    def compute_logprobs(
        self, token_id_lists: Sequence[Sequence[int]], *, starts: Sequence[int] | None = None
    ) -> list[list[float]]:
        assert starts is not None
        return [
            [-1.0, -2.0][: len(ids) - start]
            for ids, start in zip(token_id_lists, starts, strict=True)
        ]


async def publish(engine: FaultyEngine, tolerance: float = 1e-3) -> dict[str, float]:
    return await publish_and_verify(
        engine,  # type: ignore[arg-type]
        FixedLearner(),
        7,
        [[1, 2, 3], [4]],
        tolerance,
    )


async def test_an_honest_engine_passes():
    engine = FaultyEngine(logprobs=(-1.0, -2.0004))
    metrics = await publish(engine)
    assert metrics["probe_gap_max"] == pytest.approx(4e-4)
    assert metrics["probe_gap_mean"] == pytest.approx(2e-4)
    assert metrics.keys() == {
        "publish_seconds", "probe_seconds", "probe_gap_mean", "probe_gap_max",
    }  # fmt: skip
    assert [s.seed for s in engine.samplings] == [0, 1]


async def test_another_version_stops_the_run():
    with pytest.raises(WeightMismatchError, match=r"version 7 was published.*reports 6"):
        await publish(FaultyEngine(version_offset=-1))
    with pytest.raises(WeightMismatchError, match="sampled probe 0 with version 5"):
        await publish(FaultyEngine(sampled_version_offset=-2))


async def test_other_logprobs_stop_the_run_with_both_numbers_and_the_worst_token():
    with pytest.raises(WeightMismatchError) as caught:
        await publish(FaultyEngine(logprobs=(-1.002, -3.0)))
    message = str(caught.value)
    assert "completion token 1 (id 41): engine logprob -3.000000, trainer -2.000000" in message
    assert "train.probe_tolerance=2" in message
    await publish(FaultyEngine(logprobs=(-1.002, -3.0)), tolerance=1.01)


async def test_nan_does_not_pass():
    with pytest.raises(WeightMismatchError, match="engine logprob nan"):
        await publish(FaultyEngine(logprobs=(math.nan, -2.0)))


async def test_an_engine_that_samples_nothing_proves_nothing():
    with pytest.raises(WeightMismatchError, match="sampled no token"):
        await publish(FaultyEngine(logprobs=()))


async def test_the_engines_own_errors_come_through():
    with pytest.raises(EngineTimeoutError, match="too late"):
        await publish(FaultyEngine(publish_error=EngineTimeoutError("too late")))


async def test_no_probe_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="at least one probe"):
        await publish_and_verify(FaultyEngine(), FixedLearner(), 7, [], 1e-3)  # type: ignore[arg-type]


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
