"""What does not fit into the GPUs, and the line that makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.errors import AgentrlError
from agentrl_cli.launch.preflight.findings import Finding, Severity, note
from agentrl_cli.launch.preflight.memory_fit import (
    GIB,
    MemoryEstimate,
    MemoryNeed,
    NamedGpus,
    estimate_memory,
)
from agentrl_cli.log import format_count
from agentrl_cli.train.model.model_shape import ModelShape

#: A context that is shorter is none to train agents in.
_MIN_MODEL_LEN = 1024
_SMALL_MICRO_BATCH = 4096
_LORA_RANK = 32
_FEW_CALLS = 8
#: Smaller models fit anywhere.
_MIN_PARAMETERS = 100_000_000


class Changed(NamedTuple):
    """A configuration with some more overrides, and what it comes to."""

    config: ExperimentConfig
    run: ResolvedRun


#: Applies overrides. Raises AgentrlError where they make no valid run.
Change = Callable[[Sequence[str]], Changed]


def find_in_memory(
    change: Change, shape: ModelShape, gpus: NamedGpus | None
) -> tuple[MemoryEstimate, list[Finding]]:
    """The estimate for the configuration as it is, and what follows from it."""
    config, run = change(())
    estimate = estimate_memory(config, run, shape, gpus)
    found: list[Finding] = []
    if gpus is None:
        if shape.num_parameters >= _MIN_PARAMETERS:
            found.append(_describe_needs(estimate, shape))
        return estimate, found
    missing = [need for need in estimate.needs if not need.fits]
    if missing:
        words = _find_change(change, shape, gpus, config, run)
        for need in missing:
            found.append(_describe_missing(need, gpus, shape, config, words))
        return estimate, found
    found.append(_describe_fit(estimate, gpus, run, shape))
    tokens = estimate.kv_cache_tokens
    longest = config.engine.max_model_len
    if tokens is not None and tokens < _FEW_CALLS * longest:
        found.append(
            Finding(
                code="memory_few_calls",
                severity=Severity.WARNING,
                found=f"the cache of a server holds {tokens:,} tokens, which is "
                f"{tokens / longest:.1f} calls of full length (engine.max_model_len: "
                f"{longest:,}): more than that wait for each other",
                where="engine",
                remedy=f"Type engine.max_model_len={max(_MIN_MODEL_LEN, longest // 2)} if "
                "conversations stay shorter, or engine.tensor_parallel_size="
                f"{2 * config.engine.tensor_parallel_size}",
            )
        )
    return estimate, found


def _find_change(
    change: Change,
    shape: ModelShape,
    gpus: NamedGpus,
    config: ExperimentConfig,
    run: ResolvedRun,
) -> list[str] | None:
    """The first and mildest of some changes with which all fits; None: none of them does."""
    for words in _list_changes(config, run, shape, gpus):
        try:
            changed = change(words)
        except AgentrlError:
            # Such as more GPUs for a server than there are.
            continue
        if all(need.fits for need in estimate_memory(*changed, shape, gpus).needs):
            return words
    return None


def _list_changes(
    config: ExperimentConfig, run: ResolvedRun, shape: ModelShape, gpus: NamedGpus
) -> Iterator[list[str]]:
    estimate = estimate_memory(config, run, shape, gpus)
    for_engine: list[list[str]] = [[]]
    tokens = estimate.kv_cache_tokens
    if tokens is not None and _MIN_MODEL_LEN <= tokens < config.engine.max_model_len:
        for_engine = [[f"engine.max_model_len={tokens // 256 * 256}"]]
    if run.shares_gpu:
        for_engine += [
            [f"engine.gpu_memory_utilization={share}", *words]
            for share in (0.3, 0.2)
            for words in for_engine
        ]
    size = config.engine.tensor_parallel_size
    if run.servers and not run.shares_gpu:
        for factor in (2, 4, 8):
            num = max(1, config.engine.num_servers // factor)
            words = [f"engine.tensor_parallel_size={size * factor}", f"engine.num_servers={num}"]
            for_engine.append(words)
    for_trainer: list[list[str]] = [[]]
    if not config.train.gradient_checkpointing:
        for_trainer.append(["train.gradient_checkpointing=true"])
    least = max(_SMALL_MICRO_BATCH, config.engine.max_model_len)
    small = [*for_trainer[-1]]
    if config.train.micro_batch_tokens > least:
        small.append(f"train.micro_batch_tokens={least}")
        for_trainer.append(small)
    fewer = [n for n in range(config.engine.num_servers - 1, 0, -1) if run.servers]
    for_trainer += [[f"engine.num_servers={n}", *small] for n in fewer]
    if config.model.lora is None:
        lora = [f"model.lora.rank={_LORA_RANK}"]
        if config.model.frozen:
            lora.append("model.frozen=[]")
        for_trainer += [lora, [*lora, *for_trainer[1 if len(for_trainer) > 1 else 0]]]
        for_trainer += [[*lora, *small]]
    for trainer_words in for_trainer:
        for engine_words in for_engine:
            keys = {word.partition("=")[0] for word in engine_words}
            words = [w for w in trainer_words if w.partition("=")[0] not in keys]
            if words or engine_words:
                yield [*words, *engine_words]


def _describe_missing(
    need: MemoryNeed,
    gpus: NamedGpus,
    shape: ModelShape,
    config: ExperimentConfig,
    words: list[str] | None,
) -> Finding:
    available = need.available or 0
    if words is not None:
        remedy = f"Type {' '.join(words)}"
    else:
        remedy = (
            f"Type --gpu with GPUs of more memory than {gpus.name}'s, or more of them, or "
            "model.path= with a smaller model: none of the usual changes (gradient checkpointing, "
            "smaller micro-batches, an adapter, a shorter context, more GPUs a server) is enough"
        )
    return Finding(
        code="memory_engine" if need.device.startswith("server") else "memory_trainer",
        severity=Severity.ERROR,
        found=f"{config.model.path} ({format_weights(shape)}) does not "
        f"fit: on each GPU of the {need.device}, {_format_parts(need)}, and of a "
        f"{gpus.name} it can use {available / GIB:.1f} GiB",
        where=f"--gpu {gpus.name}:{gpus.count}",
        remedy=remedy,
    )


def _describe_fit(
    estimate: MemoryEstimate, gpus: NamedGpus, run: ResolvedRun, shape: ModelShape
) -> Finding:
    fitting = "; ".join(
        f"{need.device} {need.total / GIB:.1f} of {(need.available or 0) / GIB:.1f} GiB"
        for need in estimate.needs
    )
    cache = ""
    if estimate.kv_cache_tokens is not None:
        cache = f"; a server's cache holds {estimate.kv_cache_tokens:,} tokens"
    ranks = format_count(len(run.trainers), "trainer process", "trainer processes")
    found = (
        f"{format_weights(shape)} fit into {gpus.count} x {gpus.name} ({ranks}, "
        f"{format_count(len(run.servers), 'server')}): {fitting}{cache}. Assumed: "
    )
    where = f"--gpu {gpus.name}:{gpus.count}"
    return note("memory_fits", where, found + ", ".join(estimate.assumptions))


def _describe_needs(estimate: MemoryEstimate, shape: ModelShape) -> Finding:
    needs = "; ".join(f"{need.device}: {_format_parts(need)}" for need in estimate.needs)
    found = (
        f"{format_weights(shape)} on one GPU need, in the {needs}. Whether that fits is said with "
    )
    return note("memory_needed", "model.path", found + "--gpu, such as --gpu H100:8")


def format_weights(shape: ModelShape) -> str:
    """``7.62 billion weights``."""
    millions = shape.num_parameters / 1e6
    return (
        f"{millions / 1e3:.2f} billion weights"
        if millions >= 1e3
        else f"{millions:.1f} million weights"
    )


def _format_parts(need: MemoryNeed) -> str:
    parts = ", ".join(f"{name} {num / GIB:.1f}" for name, num in need.parts.items())
    return f"{need.total / GIB:.1f} GiB ({parts})"
