"""New weights to the engine, and the proof that it holds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Sampling
from agentrl_cli.errors import WeightMismatchError

if TYPE_CHECKING:
    from torch import Tensor

#: Enough tokens to show stale weights anywhere in the model, few enough to cost nothing.
NUM_PROBE_TOKENS = 8

#: Nats. Two implementations differ by 1e-6 in float32 and by a few hundredths in bfloat16.
_DEFAULT_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


class PublishingLearner(Protocol):
    """What publishing needs of a :class:`~agentrl_cli.train.learner.Learner`."""

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors by Hugging Face name."""
        ...

    def compute_logprobs(
        self, token_id_lists: Sequence[Sequence[int]], *, starts: Sequence[int] | None = None
    ) -> list[list[float]]:
        """Logprobs of each list's tokens from its start on."""
        ...


def resolve_probe_tolerance(config: ExperimentConfig) -> float:
    """Largest |engine - trainer| logprob that passes, in nats."""
    return config.train.probe_tolerance or _DEFAULT_TOLERANCES[config.model.dtype]


async def publish_and_verify(
    engine: InferenceEngine,
    learner: PublishingLearner,
    version: int,
    probes: Sequence[Sequence[int]],
    tolerance: float,
) -> dict[str, float]:
    """Gives the engine the learner's weights as ``version`` and checks that it samples with them.

    The learner must not be updated meanwhile. Deadlines are the engine's.

    Args:
        engine: gets the weights.
        learner: has them.
        version: policy version after the publication.
        probes: prompts of which the engine samples a few tokens, with fixed seeds.
        tolerance: nats.

    Returns:
        ``publish_seconds``, ``probe_seconds``, ``probe_gap_mean``, ``probe_gap_max``.

    Raises:
        WeightMismatchError: another version reported or sampled with, or other logprobs.
        EngineError: the engine failed or passed its deadline.
        ValueError: there is no probe.
    """
    if not probes:
        raise ValueError("publish_and_verify needs at least one probe prompt")
    started = time.perf_counter()
    await engine.publish_weights(version, learner.weights())
    published = time.perf_counter()
    reported = await engine.policy_version()
    if reported != version:
        raise WeightMismatchError(
            f"policy version {version} was published, but the engine reports {reported}: it still "
            "samples with other weights. The run cannot go on; start it again to resume"
        )
    gaps = await _probe(engine, learner, version, probes, tolerance)
    return {
        "publish_seconds": published - started,
        "probe_seconds": time.perf_counter() - published,
        "probe_gap_mean": sum(gaps) / len(gaps),
        "probe_gap_max": max(gaps),
    }


async def _probe(
    engine: InferenceEngine,
    learner: PublishingLearner,
    version: int,
    probes: Sequence[Sequence[int]],
    tolerance: float,
) -> list[float]:
    """|engine - trainer| of every probed token, all within ``tolerance``."""
    generations = await asyncio.gather(
        *(
            engine.generate(prompt, Sampling(max_tokens=NUM_PROBE_TOKENS, seed=seed))
            for seed, prompt in enumerate(probes)
        )
    )
    expected = await asyncio.to_thread(
        learner.compute_logprobs,
        [
            [*prompt, *generation.completion_ids]
            for prompt, generation in zip(probes, generations, strict=True)
        ],
        starts=[len(prompt) for prompt in probes],
    )
    gaps: list[float] = []
    for index, (generation, logprobs) in enumerate(zip(generations, expected, strict=True)):
        gaps += _compare(generation, logprobs, version, tolerance, index)
    if not gaps:
        raise WeightMismatchError(
            f"policy version {version} cannot be verified: the engine sampled no token of any of "
            f"{len(probes)} probe prompts"
        )
    return gaps


def _compare(
    generation: Generation, logprobs: Sequence[float], version: int, tolerance: float, index: int
) -> list[float]:
    foreign = set(generation.versions) - {version}
    if foreign:
        raise WeightMismatchError(
            f"policy version {version} was published, but the engine sampled probe {index} with "
            f"version {', '.join(map(str, sorted(foreign)))}"
        )
    pairs = list(zip(generation.rollout_logprobs, logprobs, strict=True))
    gaps = [abs(engine - trainer) for engine, trainer in pairs]
    # Not "gap > tolerance": a NaN must not pass.
    wrong = [place for place, gap in enumerate(gaps) if not gap <= tolerance]
    if wrong:
        worst = max(wrong, key=lambda place: gaps[place])
        engine, trainer = pairs[worst]
        raise WeightMismatchError(
            f"policy version {version}: the engine does not hold the trainer's weights. Probe "
            f"{index}, completion token {worst} (id {generation.completion_ids[worst]}): engine "
            f"logprob {engine:.6f}, trainer {trainer:.6f}, apart by {gaps[worst]:.2e}; allowed "
            f"{tolerance:.2e}. If the two only round differently, type "
            f"train.probe_tolerance={_round_up(gaps[worst])}"
        )
    return gaps


def _round_up(gap: float) -> str:
    return f"{2 * gap:.1g}"
