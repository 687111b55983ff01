"""New weights to the engine, and the proof that every copy of the model holds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Probe, Replica, Sampling
from agentrl_cli.errors import EngineError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger
from agentrl_cli.train.diagnosis import DiagnosedLearner, ScoredSequence, explain_mismatch

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)

#: Enough tokens to show stale weights anywhere in the model, few enough to cost nothing.
NUM_PROBE_TOKENS = 8

#: Nats. Two implementations differ by 1e-6 in float32 and by a few hundredths in bfloat16.
_DEFAULT_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


class PublishingLearner(DiagnosedLearner, Protocol):
    """What publishing needs of a :class:`~agentrl_cli.train.learner.Learner`."""

    def weights(self) -> Mapping[str, Tensor]:
        """The tensors by the name they are published under."""
        ...


@dataclass(frozen=True, slots=True)
class _Answers:
    """What one replica sampled after each probe prompt."""

    replica: str
    generations: Sequence[Generation]


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

    Every replica is checked; one that dies meanwhile is not (the engine checks it by the same
    probes when it comes back), but at least one must be. The learner must not be updated
    meanwhile. Deadlines are the engine's.

    Args:
        engine: gets the weights.
        learner: has them.
        version: policy version after the publication.
        probes: prompts after which each replica samples a few tokens, with fixed seeds.
        tolerance: nats.

    Returns:
        ``publish_seconds``, ``probe_seconds``, ``probe_gap_mean``, ``probe_gap_max``.

    Raises:
        WeightMismatchError: another version reported or sampled with, or other logprobs; names
            the replica, and the parameters that it seems to have kept.
        EngineError: the engine failed or passed its deadline.
        ValueError: there is no probe.
    """
    if not probes:
        raise ValueError("publish_and_verify needs at least one probe prompt")
    started = time.perf_counter()
    # Of several trainers the first waits here for the others' shards, and agents go on meanwhile.
    weights = await asyncio.to_thread(learner.weights)
    await engine.publish_weights(version, weights)
    published = time.perf_counter()
    answers = await _ask_replicas(engine, version, probes)
    sequences = await _score(learner, probes, answers)
    gaps: list[float] = []
    for one, scored in zip(answers, sequences, strict=True):
        try:
            gaps += _compare(one, scored, version, tolerance)
        except WeightMismatchError as error:
            explanation = await asyncio.to_thread(
                explain_mismatch, learner, engine.previous_weights, scored, tolerance
            )
            raise WeightMismatchError(f"{error}. {explanation}") from None
    engine.expect(version, [_build_probe(one, tolerance) for one in sequences[0]])
    return {
        "publish_seconds": published - started,
        "probe_seconds": time.perf_counter() - published,
        "probe_gap_mean": sum(gaps) / len(gaps),
        "probe_gap_max": max(gaps),
    }


def _build_probe(sequence: ScoredSequence, tolerance: float) -> Probe:
    return Probe(
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.start,
        logprobs=tuple(sequence.trainer_logprobs),
        tolerance=tolerance,
    )


async def _ask_replicas(
    engine: InferenceEngine, version: int, probes: Sequence[Sequence[int]]
) -> list[_Answers]:
    """The answers of all replicas that live to give them."""
    replicas = list(engine.replicas)
    results = await asyncio.gather(
        *(_ask(replica, version, probes) for replica in replicas), return_exceptions=True
    )
    answers = []
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, ServerDownError):
            _log.warning(
                "%s died before version %d was verified: %s", replica.name, version, result
            )
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append(result)
    if not answers:
        down = "; ".join(str(result) for result in results) or "none of its servers is up"
        raise EngineError(f"policy version {version} cannot be verified on any server: {down}")
    return answers


async def _ask(replica: Replica, version: int, probes: Sequence[Sequence[int]]) -> _Answers:
    reported = await replica.policy_version()
    if reported != version:
        raise WeightMismatchError(
            f"policy version {version} was published, but {replica.name} reports {reported}: it "
            "still samples with other weights, or something else than this run changed its "
            "version. The run cannot go on; start it again to resume"
        )
    generations = await asyncio.gather(
        *(
            replica.generate(prompt, Sampling(max_tokens=NUM_PROBE_TOKENS, seed=seed))
            for seed, prompt in enumerate(probes)
        )
    )
    if not any(generation.completion_ids for generation in generations):
        raise WeightMismatchError(
            f"policy version {version} cannot be verified: {replica.name} sampled no token of any "
            f"of {len(probes)} probe prompts"
        )
    return _Answers(replica.name, generations)


async def _score(
    learner: PublishingLearner, probes: Sequence[Sequence[int]], answers: Sequence[_Answers]
) -> list[list[ScoredSequence]]:
    """Both sides' logprobs of every replica's probes, from one call of the learner."""
    pairs = [
        (prompt, generation)
        for one in answers
        for prompt, generation in zip(probes, one.generations, strict=True)
    ]
    scored = await asyncio.to_thread(
        learner.compute_logprobs,
        [[*prompt, *generation.completion_ids] for prompt, generation in pairs],
        starts=[len(prompt) for prompt, _ in pairs],
    )
    sequences = [
        ScoredSequence(
            token_ids=[*prompt, *generation.completion_ids],
            start=len(prompt),
            engine_logprobs=generation.rollout_logprobs,
            trainer_logprobs=logprobs,
        )
        for (prompt, generation), logprobs in zip(pairs, scored, strict=True)
    ]
    count = len(probes)
    return [sequences[first : first + count] for first in range(0, len(sequences), count)]


def _compare(
    answers: _Answers, sequences: Sequence[ScoredSequence], version: int, tolerance: float
) -> list[float]:
    """|engine - trainer| of every probed token of one replica, all within ``tolerance``."""
    name, gaps = answers.replica, []
    for index, (generation, one) in enumerate(zip(answers.generations, sequences, strict=True)):
        foreign = set(generation.versions) - {version}
        if foreign:
            raise WeightMismatchError(
                f"policy version {version} was published, but {name} sampled probe {index} with "
                f"version {', '.join(map(str, sorted(foreign)))}"
            )
        gaps.append(one.compute_gaps(one.trainer_logprobs))
    # Not "gap > tolerance": a NaN must not pass.
    wrong = [
        (probe, place)
        for probe, of_probe in enumerate(gaps)
        for place, gap in enumerate(of_probe)
        if not gap <= tolerance
    ]
    if wrong:
        probe, place = max(wrong, key=lambda at: _order(gaps[at[0]][at[1]]))
        one, gap = sequences[probe], gaps[probe][place]
        raise WeightMismatchError(
            f"policy version {version}: {name} does not hold the trainer's weights. Probe "
            f"{probe}, completion token {place} (id {one.token_ids[one.start + place]}): engine "
            f"logprob {one.engine_logprobs[place]:.6f}, trainer "
            f"{one.trainer_logprobs[place]:.6f}, apart by {gap:.2e}; allowed {tolerance:.2e}. If "
            f"the two only round differently, type train.probe_tolerance={_round_up(gap)}"
        )
    return [gap for of_probe in gaps for gap in of_probe]


def _order(gap: float) -> float:
    return float("inf") if gap != gap else gap


def _round_up(gap: float) -> str:
    return f"{2 * gap:.1g}"
