"""New weights to the engine, and the proof that every copy of the model holds them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Probe, Replica, Sampling
from agentrl_cli.errors import EngineError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger
from agentrl_cli.models.lora import ADAPTER_NAME, to_saved_name

if TYPE_CHECKING:
    from agentrl_cli.train.learner import Learner

_log = get_logger(__name__)

#: Nats. Two implementations differ by 1e-6 in float32 and by a few hundredths in bfloat16.
_DEFAULT_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}

#: Enough tokens to show stale weights anywhere in the model, few enough to cost nothing.
_NUM_PROBE_TOKENS = 8
_QUESTIONS = ("Count from one to ten.", "What is 17 + 25?", "Name three colours.")
#: A server that is slow or dies between a publication and its probes is no reason to end a run.
_MAX_ATTEMPTS = 5
#: Long enough to reach every weight, short enough to cost nothing.
_MAX_PROMPT_TOKENS = 128


def resolve_probe_tolerance(config: ExperimentConfig) -> float:
    """Largest |engine - trainer| logprob that passes, in nats."""
    return config.train.probe_tolerance or _DEFAULT_TOLERANCES[config.model.dtype]


def build_probes(tokenizer: Any, max_model_len: int) -> list[list[int]]:
    """Prompts in the model's own chat format, as ids; each leaves room for its completion."""
    longest = max(1, min(_MAX_PROMPT_TOKENS, max_model_len - _NUM_PROBE_TOKENS))
    prompts = []
    for question in _QUESTIONS:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(list(tokenizer.encode(text, add_special_tokens=False))[-longest:])
    return prompts


@torch.no_grad()
def collect_published(
    model: PreTrainedModel, published: Literal["whole", "adapter"]
) -> dict[str, Tensor]:
    """The tensors of ``model`` by the names that an engine knows them by, mostly not copied.

    ``adapter``: those of the adapter, as peft's file has them; ``whole``: all of them by Hugging
    Face name, with the adapter added where there is one. Tied ones are there once, under the
    first of their names.
    """
    state = model.state_dict()
    if published == "adapter":
        return {to_saved_name(n): t.detach() for n, t in state.items() if ".lora_" in n}
    first_names: dict[int, str] = {}
    tensors = {
        name.replace(".base_layer.", "."): tensor.detach()
        for name, tensor in state.items()
        if ".lora_" not in name and first_names.setdefault(tensor.data_ptr(), name) == name
    }
    for layer, module in model.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight"):
            base = tensors[f"{layer}.weight"]
            # Added in float32: the sum is rounded once.
            merged = base.float() + module.get_delta_weight(ADAPTER_NAME).float()
            tensors[f"{layer}.weight"] = merged.to(base.dtype)
    return tensors


async def publish_and_verify(
    engine: InferenceEngine,
    learner: Learner,
    version: int,
    prompts: Sequence[Sequence[int]],
    tolerance: float,
) -> dict[str, float]:
    """Gives the engine the learner's weights as ``version`` and checks that it samples with them.

    Every replica is checked. One that fails meanwhile is not (the engine checks it by the same
    probes when it comes back), but at least one must be: if all fail, the weights are published
    again as soon as one is healthy. The learner must not be updated
    meanwhile; each of its methods is called once, because other ranks run them too. Deadlines are
    the engine's.

    Args:
        engine: gets the weights.
        learner: has them.
        version: policy version after the publication.
        prompts: token ids after which each replica samples a few tokens, with fixed seeds.
        tolerance: nats.

    Returns:
        ``publish_seconds``, ``probe_seconds``, ``probe_gap_mean``, ``probe_gap_max``.

    Raises:
        WeightMismatchError: a replica reported or sampled with another version, or computed
            other logprobs; the message names it and shows both numbers.
        EngineError: the engine failed or passed its deadline.
    """
    started = time.perf_counter()
    # Gathering the shards of several trainers takes a while; agents continue meanwhile.
    weights = await asyncio.to_thread(learner.weights)
    answers, published = await _publish_and_ask(engine, version, weights, prompts)
    scored = await asyncio.to_thread(_score, learner, prompts, list(answers.values()))
    gaps = [
        gap
        for (name, generations), expected in zip(answers.items(), scored, strict=True)
        for gap in _compare(name, version, generations, expected, tolerance)
    ]
    sampled = zip(prompts, next(iter(answers.values())), scored[0], strict=True)
    probes = [
        Probe(
            token_ids=(*prompt, *generation.completion_ids),
            num_prompt_tokens=len(prompt),
            logprobs=tuple(logprobs),
            tolerance=tolerance,
        )
        for prompt, generation, logprobs in sampled
    ]
    engine.expect(version, probes)
    return {
        "publish_seconds": published - started,
        "probe_seconds": time.perf_counter() - published,
        "probe_gap_mean": sum(gaps) / len(gaps),
        "probe_gap_max": max(gaps),
    }


async def _publish_and_ask(
    engine: InferenceEngine,
    version: int,
    weights: Mapping[str, Tensor],
    prompts: Sequence[Sequence[int]],
) -> tuple[dict[str, list[Generation]], float]:
    """What at least one replica sampled with the weights, and when they were published."""
    for num_left in reversed(range(_MAX_ATTEMPTS)):
        # Again, because it waits until a server is healthy; the engine ends that when a server's
        # restarts are used up.
        await engine.publish_weights(version, weights)
        published = time.perf_counter()
        answers, failed = await _ask_replicas(engine, version, prompts)
        if answers or not num_left:
            break
        _log.warning("no server showed version %d (%s): it is published again", version, failed)
    if not answers:
        raise EngineError(f"policy version {version} cannot be verified on any server: {failed}")
    return answers, published


async def _ask_replicas(
    engine: InferenceEngine, version: int, prompts: Sequence[Sequence[int]]
) -> tuple[dict[str, list[Generation]], str]:
    """What each replica that stayed healthy sampled, by its name, and why the others did not."""
    replicas = list(engine.replicas)
    results = await asyncio.gather(
        *(_ask(replica, version, prompts) for replica in replicas), return_exceptions=True
    )
    answers = {}
    for replica, result in zip(replicas, results, strict=True):
        if isinstance(result, ServerDownError):
            _log.warning(
                "%s failed before version %d was verified: %s", replica.name, version, result
            )
        elif isinstance(result, BaseException):
            raise result
        else:
            answers[replica.name] = result
    failed = "; ".join(str(result) for result in results if isinstance(result, ServerDownError))
    return answers, failed or "none of its servers is healthy"


async def _ask(
    replica: Replica, version: int, prompts: Sequence[Sequence[int]]
) -> list[Generation]:
    reported = await replica.policy_version()
    if reported != version:
        raise WeightMismatchError(
            f"policy version {version} was published, but {replica.name} reports {reported}: it "
            "still samples with other weights, or something outside this run changed its "
            "version. The run cannot continue; start it again to resume"
        )
    generations = await asyncio.gather(
        *(
            replica.generate(prompt, Sampling(max_tokens=_NUM_PROBE_TOKENS, seed=seed))
            for seed, prompt in enumerate(prompts)
        )
    )
    if not any(generation.completion_ids for generation in generations):
        raise WeightMismatchError(
            f"policy version {version} cannot be verified: {replica.name} sampled no token for any "
            f"of {len(prompts)} probe prompts"
        )
    return generations


def _score(
    learner: Learner, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Generation]]
) -> list[list[list[float]]]:
    """The trainer's logprobs of what each replica sampled, from one call of the learner."""
    sequences = [
        [*prompt, *generation.completion_ids]
        for generations in answers
        for prompt, generation in zip(prompts, generations, strict=True)
    ]
    starts = [len(prompt) for prompt in prompts] * len(answers)
    scored = learner.compute_logprobs(sequences, starts=starts)
    return [scored[i : i + len(prompts)] for i in range(0, len(scored), len(prompts))]


def _compare(
    name: str,
    version: int,
    generations: Sequence[Generation],
    expected: Sequence[Sequence[float]],
    tolerance: float,
) -> list[float]:
    """|engine - trainer| of every probed token of one replica, all within the tolerance."""
    # The gap first, and infinite for NaN, so that the largest one is reported.
    tokens: list[tuple[float, int, int, float, float]] = []
    for index, (generation, logprobs) in enumerate(zip(generations, expected, strict=True)):
        foreign = set(generation.versions) - {version}
        if foreign:
            raise WeightMismatchError(
                f"policy version {version} was published, but {name} sampled probe {index} with "
                f"version {', '.join(map(str, sorted(foreign)))}"
            )
        for place, (engine, trainer) in enumerate(
            zip(generation.rollout_logprobs, logprobs, strict=True)
        ):
            gap = abs(engine - trainer)
            tokens.append((math.inf if math.isnan(gap) else gap, index, place, engine, trainer))
    gap, index, place, engine, trainer = max(tokens, key=lambda token: token[0])
    if gap > tolerance:
        token_id = generations[index].completion_ids[place]
        raise WeightMismatchError(
            f"policy version {version}: {name} does not hold the trainer's weights. Probe "
            f"{index}, completion token {place} (id {token_id}): engine logprob {engine:.6f}, "
            f"trainer {trainer:.6f}, apart by {gap:.2e}; allowed {tolerance:.2e}. If they only "
            f"round differently, type train.probe_tolerance={2 * gap:.1g}. Otherwise it did not "
            "load what was published: look into its log, then type the same command again to "
            "resume from the last checkpoint"
        )
    return [token[0] for token in tokens]
