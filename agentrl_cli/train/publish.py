"""New weights to the engine, and the proof that every copy of the model holds them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl_cli.engine.probes import (
    PROBE_SAMPLING,
    ProbeGap,
    compute_probe_gap,
    read_likely,
)
from agentrl_cli.engine.protocol import Generation, InferenceEngine, Probe, Replica
from agentrl_cli.errors import EngineError, ServerDownError, WeightMismatchError
from agentrl_cli.log import get_logger
from agentrl_cli.models.lora import ADAPTER_NAME, to_saved_name
from agentrl_cli.train.model.sharding import own_part

if TYPE_CHECKING:
    from agentrl_cli.train.learner import Learner

_log = get_logger(__name__)

#: Nats. Two implementations differ by 1e-6 in float32, by 1e-4 where a GPU shortens its factors.
_MIN_TOLERANCE = 1e-3
#: An engine and the trainer both round, each in its own order. With few prompts the two means vary
#: by a third.
_ROUNDING_FACTOR = 5.0

#: A power of two, so that it can be undone exactly. Made smaller, a model rounds no worse than
#: before; random changes make 30 layers amplify rounding until it hides a stale one.
_SHRINKING = 0.25
#: Standard deviation of the half of an adapter that starts at zero.
_ADAPTER_CHANGE = 0.2
#: A gap above so many times what is allowed is no rounding.
_MAX_ROUNDING_RATIO = 10.0

_QUESTION = "Name three colours."
#: Of replies that may go on in many ways: where one token is certain, no weights show.
_BEGINNINGS = ("", "I", "The", "My", "A", "To find", "In the", "First")
#: A server that is slow or dies between a publication and its probes is no reason to end a run.
_MAX_ATTEMPTS = 5
#: Long enough to reach every weight, short enough to cost nothing.
_MAX_QUESTION_TOKENS = 16


def build_probes(tokenizer: Any, max_model_len: int) -> list[list[int]]:
    """Prompts in the model's own chat format, as ids; each leaves room for its completion.

    They are the beginnings of replies to one question, which both sides compute once.
    """
    question = [{"role": "user", "content": _QUESTION}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    asked = list(tokenizer.encode(text, add_special_tokens=False))[-_MAX_QUESTION_TOKENS:]
    replies = [tokenizer.encode(text, add_special_tokens=False) for text in _BEGINNINGS]
    longest = max(1, max_model_len - 1)
    return [[*asked, *reply][-longest:] for reply in replies]


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


@contextmanager
def visibly_changed(model: nn.Module) -> Iterator[None]:
    """A block in which every trained weight is another one, by more than any rounding hides.

    A learning rate of 1e-6 moves logprobs by less than bfloat16 rounds them: an engine that never
    loads one of the layers would be noticed only when training has long been spoilt. These
    weights, published and verified once, show it before the first step. Whole weights are not
    copied for that but made smaller, and then as they were.
    """
    trained = {n: own_part(p.detach()) for n, p in model.named_parameters() if p.requires_grad}
    adapter = {tensor: tensor.clone() for name, tensor in trained.items() if ".lora_B." in name}
    for tensor in adapter:
        source = torch.Generator(tensor.device).manual_seed(0)
        tensor.normal_(std=_ADAPTER_CHANGE, generator=source)
    shrunk = [] if adapter else list(trained.values())
    for tensor in shrunk:
        tensor.mul_(_SHRINKING)
    try:
        yield
    finally:
        for tensor in shrunk:
            tensor.div_(_SHRINKING)
        for tensor, own in adapter.items():
            tensor.copy_(own)


async def publish_and_verify(
    engine: InferenceEngine,
    learner: Learner,
    version: int,
    prompts: Sequence[Sequence[int]],
    tolerance: float | None = None,
    on_served: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Gives the engine the learner's weights as ``version`` and checks that it samples with them.

    Every replica is checked, one that fails meanwhile when it comes back; if all fail, the weights
    are published again as soon as one is healthy. The learner must not be updated meanwhile; each
    of its methods is called once, because other ranks run them too. Deadlines are the engine's.

    Args:
        engine: gets the weights.
        learner: has them.
        version: policy version after the publication.
        prompts: token ids after which each replica says which tokens are likely.
        tolerance: maximum probability-weighted mean gap in nats; None: by the trainer's rounding.
        on_served: called when replicas have sampled with the weights, before they are compared.

    Returns:
        ``publish_seconds``, ``probe_seconds``, ``probe_gap_mean`` (weighted by probability, the
        largest of all replicas), ``probe_gap_max`` (of any token), ``probe_rounding_mean`` (of the
        trainer's own rounding), ``probe_tolerance``.

    Raises:
        WeightMismatchError: a replica reported or sampled with another version, or computed
            other logprobs; the message names it and shows both numbers.
        EngineError: the engine failed or passed its deadline.
    """
    started = time.perf_counter()
    # Gathering the shards of several trainers takes a while; agents continue meanwhile.
    weights = await asyncio.to_thread(learner.weights)
    answers, published = await _publish_and_ask(engine, version, weights, prompts)
    on_served()
    likely = [read_likely(generations) for generations in answers.values()]
    candidates = [[list(logprobs) for logprobs in of_replica] for of_replica in likely]
    scored, wide = await asyncio.to_thread(learner.score_probes, prompts, candidates)
    expected = [_name(*pair) for pair in zip(candidates, scored, strict=True)]
    rounding = compute_probe_gap(_name(candidates[0], wide), expected[0])
    if tolerance is None:
        tolerance = max(_MIN_TOLERANCE, _ROUNDING_FACTOR * rounding.mean)
    gaps = [compute_probe_gap(*pair) for pair in zip(likely, expected, strict=True)]
    for name, gap in zip(answers, gaps, strict=True):
        _check(name, version, gap, tolerance)
    probes = [
        Probe(prompt_ids=tuple(prompt), logprobs=tuple(logprobs.items()), tolerance=tolerance)
        for prompt, logprobs in zip(prompts, expected[0], strict=True)
    ]
    engine.expect(version, probes)
    return {
        "publish_seconds": published - started,
        "probe_seconds": time.perf_counter() - published,
        "probe_gap_mean": max(gap.mean for gap in gaps),
        "probe_gap_max": max(gap.max for gap in gaps),
        "probe_rounding_mean": rounding.mean,
        "probe_tolerance": tolerance,
    }


def _name(
    candidates: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]
) -> list[dict[int, float]]:
    """The logprobs by token."""
    pairs = zip(candidates, logprobs, strict=True)
    return [dict(zip(ids, values, strict=True)) for ids, values in pairs]


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
        *(replica.generate(prompt, PROBE_SAMPLING) for prompt in prompts)
    )
    for index, generation in enumerate(generations):
        foreign = set(generation.versions) - {version}
        if foreign:
            raise WeightMismatchError(
                f"policy version {version} was published, but {replica.name} sampled after probe "
                f"prompt {index} with version {', '.join(map(str, sorted(foreign)))}"
            )
        if not generation.top_logprobs:
            raise WeightMismatchError(
                f"policy version {version} cannot be verified: {replica.name} sampled no token "
                f"after probe prompt {index}"
            )
    return generations


def _check(name: str, version: int, gap: ProbeGap, tolerance: float) -> None:
    # Not "gap > tolerance": a NaN must not pass.
    if not gap.mean <= tolerance:
        reason = "It"
        if gap.mean <= _MAX_ROUNDING_RATIO * tolerance:
            key = f"train.probe_tolerance={2 * gap.mean:.1g}"
            reason = f"If they only round differently, type {key}. Otherwise it"
        raise WeightMismatchError(
            f"policy version {version}: {name} does not hold the trainer's weights. "
            f"{gap.describe(tolerance)}. {reason} did not "
            "load what was published: look into its log, then type the same command again to "
            "resume from the last checkpoint"
        )
