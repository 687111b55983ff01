"""Whether models, gradients, optimizer, activations and the engine's cache fit into GPUs.

All is arithmetic on a model's shape; nothing is loaded. With P weights, of which T are trained, a
number type of d bytes, and R ranks, a trainer holds

    one rank    d P + 4 T (float32 masters, with bfloat16) + 4 T (gradients) + 8 T (AdamW)
    R ranks     (4 P + 4 T + 8 T) / R, and what FSDP puts together: d bytes for each weight outside
                the layers and of two layers, 4 for the gradients of the larger of the two parts

beside the activations of one micro-batch. Loading puts the whole model on each GPU in float32
first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl_cli.config.experiment import ExperimentConfig, LoraConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.errors import UserInputError, format_nearest
from agentrl_cli.train.model.model_shape import ModelShape

GIB = 2**30

#: Usable memory in GiB, as drivers report it.
GPU_MEMORY: Mapping[str, float] = {
    "T4": 14.6,
    "V100-32": 31.7,
    "A10": 22.1,
    "L4": 22.0,
    "L40S": 44.4,
    "A6000": 47.4,
    "3090": 23.6,
    "4090": 23.5,
    "5090": 31.3,
    "A100-40": 39.4,
    "A100-80": 79.1,
    "H100": 79.1,
    "H200": 139.8,
    "B200": 178.3,
}
#: Of the memory that a card is sold with.
_USABLE_SHARE = 0.98
#: The CUDA context, workspaces, tiles of logits, and what the allocator cannot use.
_TRAINER_OVERHEAD = 2 * GIB
#: Of a server: context, CUDA graphs, the activations of a full batch.
_SERVER_OVERHEAD = 3 * GIB
#: What a server that has released its memory keeps.
_ASLEEP = 1.5 * GIB
_MAX_GPUS = 100_000


@dataclass(frozen=True, slots=True)
class NamedGpus:
    """GPUs as typed: ``H100:8`` or ``80GB:8``."""

    name: str
    count: int
    num_bytes: int
    """Usable memory of one."""


def parse_gpus(text: str) -> NamedGpus:
    """What ``--gpu`` names.

    Raises:
        UserInputError: no such GPU, or no such number of them.
    """
    name, separator, number = text.partition(":")
    if separator and not (number.isascii() and number.isdigit() and 0 < int(number) <= _MAX_GPUS):
        raise UserInputError(
            f"--gpu {text!r}: {number!r} is no number of GPUs. Type --gpu {name or 'H100'}:8"
        )
    count = int(number) if separator else 1
    known = {key.upper(): gib for key, gib in GPU_MEMORY.items()}
    gib = known.get(name.upper())
    if gib is None and (size := re.fullmatch(r"(\d{1,4}(?:\.\d+)?)\s*GI?B", name.upper())):
        gib = float(size[1]) * _USABLE_SHARE
    if not gib:
        # A100 alone may be either: the nearest other name would be A10.
        sizes = [key for key in GPU_MEMORY if key.startswith(f"{name.upper()}-")]
        meant = f"there are {' and '.join(sizes)}" if sizes and name else ""
        raise UserInputError(
            f"--gpu {text!r}: no GPU of that name is known; "
            f"{meant or format_nearest(name, GPU_MEMORY, max_listed=len(GPU_MEMORY))}. Type --gpu "
            f"{sizes[0] if meant else 'H100'}:8, or its memory, as in --gpu 80GB:8"
        )
    return NamedGpus(name, count, int(gib * GIB))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """What one GPU has to hold."""

    device: str
    """Whose GPU it is: ``trainer``, or a server's name."""
    parts: Mapping[str, int]
    """Bytes of each thing that is there at the same time."""
    available: int | None
    """Bytes; None: no GPU was named."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """False where more is needed than there is."""
        return self.available is None or self.total <= self.available


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a run needs of each kind of GPU."""

    needs: tuple[MemoryNeed, ...]
    """The trainer's first."""
    kv_cache_tokens: int | None = None
    """Tokens that one server's cache holds; None: no server computes on a named GPU."""
    assumptions: tuple[str, ...] = ()


def estimate_memory(
    config: ExperimentConfig, run: ResolvedRun, shape: ModelShape, gpus: NamedGpus | None
) -> MemoryEstimate:
    """What the run needs on GPUs such as the named ones; without any, on one GPU for each part."""
    available = None if gpus is None else gpus.num_bytes
    num_ranks = len(run.trainers) if gpus is not None else 1
    state = _list_trainer_state(config, shape, num_ranks)
    work = _list_trainer_work(config, shape, num_ranks)
    left = available
    if available is not None and run.shares_gpu:
        left = int(available - _ASLEEP)
    training = MemoryNeed(device="trainer", parts={**state, **work}, available=left)
    loading = MemoryNeed(
        device="trainer, while it loads", parts=_list_loading(config, shape), available=left
    )
    needs = [training] if loading.total < training.total else [training, loading]
    assumptions = [
        f"micro-batches of {count_micro_batch_tokens(config):,} tokens",
        "activations of dense attention layers in the style of Llama and Qwen",
    ]
    if config.train.critic is not None and config.train.critic.path is not None:
        assumptions.append("a critic as large as the policy")
    server = run.servers[0] if run.servers else None
    if server is None or available is None or not server.gpus:
        return MemoryEstimate(needs=tuple(needs), assumptions=tuple(assumptions))
    share = int(available * server.gpu_memory_utilization)
    if server.shares_gpu:
        # The trainer's state stays where it is while the server samples.
        stays = {k: v for k, v in state.items() if k != "gradients"}
        parts = {"the server's share": share, **{f"trainer's {k}": v for k, v in stays.items()}}
        needs.append(MemoryNeed(device="GPU that both share", parts=parts, available=available))
    per_token = count_kv_bytes(config, shape)
    parts = {"weights": _count_dtype_bytes(config) * shape.num_parameters}
    parts["weights"] //= config.engine.tensor_parallel_size
    parts["context, graphs, activations"] = _SERVER_OVERHEAD
    room = max(0, share - sum(parts.values()))
    parts[f"cache for one call of {config.engine.max_model_len:,} tokens"] = (
        per_token * config.engine.max_model_len
    )
    needs.append(MemoryNeed(device=f"server ({run.engine_kind})", parts=parts, available=share))
    return MemoryEstimate(
        needs=tuple(needs),
        kv_cache_tokens=room // per_token,
        assumptions=tuple(assumptions),
    )


def count_kv_bytes(config: ExperimentConfig, shape: ModelShape) -> int:
    """Keys and values of one token on each GPU of a server."""
    whole = 2 * shape.num_layers * shape.key_size * _count_dtype_bytes(config)
    return max(1, whole // config.engine.tensor_parallel_size)


def count_micro_batch_tokens(config: ExperimentConfig) -> int:
    """Tokens of the largest micro-batch: a sample that is longer has one to itself."""
    longest = config.engine.max_model_len
    whole = config.train_dataset.batch_size * config.gconfig.n_samples * longest
    return min(max(config.train.micro_batch_tokens, longest), whole)


def count_activation_bytes(config: ExperimentConfig, shape: ModelShape) -> int:
    """What the backward pass of one micro-batch keeps of its forward pass.

    Of a layer and token, in numbers: two norms keep their input in float32 and what they made of
    it; the attention its queries, keys, values and result, and the output projection its input; the
    feed-forward part four of its width.
    """
    size = _count_dtype_bytes(config)
    hidden = shape.hidden_size
    of_norms = 2 * (4 + 2 * size) * hidden
    of_attention = size * (3 * shape.query_size + 2 * shape.key_size)
    layer = of_norms + of_attention + size * 4 * shape.intermediate_size
    if config.train.gradient_checkpointing:
        per_token = shape.num_layers * size * hidden + layer
    else:
        per_token = shape.num_layers * layer
    return per_token * count_micro_batch_tokens(config)


def _count_dtype_bytes(config: ExperimentConfig) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _count_trained(config: ExperimentConfig, shape: ModelShape) -> int:
    lora: LoraConfig | None = config.model.lora
    if lora is None:
        return shape.num_trained
    targets = None if lora.target_modules == "all-linear" else lora.target_modules
    return shape.count_adapter_parameters(lora.rank, targets)


def _list_trainer_state(
    config: ExperimentConfig, shape: ModelShape, num_ranks: int
) -> dict[str, int]:
    """What stays on a rank's GPU from one update to the next, and the gradients."""
    size, total, trained = (
        _count_dtype_bytes(config), shape.num_parameters, _count_trained(config, shape)
    )  # fmt: skip
    num_models = 1 if config.train.critic is None else 2
    weights = size * total if num_ranks == 1 else 4 * total
    masters = 4 * trained if num_ranks == 1 and size < 4 else 0
    state = {
        "weights": num_models * weights,
        "float32 masters": num_models * masters,
        "gradients": num_models * 4 * trained,
        "AdamW": num_models * 8 * trained,
    }
    if config.train.algorithm.uses_reference and config.model.lora is None:
        state["reference model"] = size * total
    return {name: num // num_ranks for name, num in state.items() if num}


def _list_trainer_work(
    config: ExperimentConfig, shape: ModelShape, num_ranks: int
) -> dict[str, int]:
    """What is on a rank's GPU only while it computes, or publishes."""
    size = _count_dtype_bytes(config)
    work = {"activations": count_activation_bytes(config, shape)}
    if num_ranks > 1:
        copy = size * shape.num_parameters
        is_copied = config.model.lora is None and config.engine.weight_transfer.kind != "disk"
        if is_copied and copy > work["activations"]:
            # On rank 0, between updates: activations are gone by then.
            work = {"whole copy to publish": copy}
        root, layer = shape.root_parameters, shape.layer_parameters
        work["layers put together"] = size * (root + 2 * layer) + 4 * max(root, layer)
    return {**work, "context, workspaces, logits": _TRAINER_OVERHEAD}


def _list_loading(config: ExperimentConfig, shape: ModelShape) -> dict[str, int]:
    """What a rank's GPU holds before the model is cast, or in shards."""
    parts = {"whole model in float32": 4 * shape.num_parameters}
    if config.train.algorithm.uses_reference and config.model.lora is None:
        parts["reference in float32"] = 4 * shape.num_parameters
    if config.train.critic is not None:
        parts["critic in float32"] = 4 * shape.num_parameters
    return {**parts, "context": GIB}
