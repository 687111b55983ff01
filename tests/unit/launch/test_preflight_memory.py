"""Estimates of memory, against numbers that were worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, resolve_run
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.preflight.memory_findings import Changed, find_in_memory
from agentrl_cli.launch.preflight.memory_fit import (
    GIB,
    MemoryNeed,
    NamedGpus,
    count_activation_bytes,
    count_kv_bytes,
    estimate_memory,
    parse_gpus,
)
from agentrl_cli.train.data.prefix_tree import Segment
from agentrl_cli.train.model.layers import prepare_layers
from agentrl_cli.train.model.model_shape import ModelShape, load_shape
from agentrl_cli.train.model.packed_attention import AttentionLayout

#: As published for Qwen2.5-7B: 7.62 billion weights, of which 6.53 billion are in the layers.
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
    "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
WEIGHTS = 7_615_616_512
HEADER = """\
experiment_name: demo
model: {path: MODEL}
agent_builder_path: a.py:build
train_dataset: {path: t.jsonl}
engine: {max_model_len: 8192}
"""


_TIGHT_SERVER = [
    "model.lora.rank=8",
    "train.gradient_checkpointing=true",
    "engine.gpu_memory_utilization=0.45",
    "engine.max_model_len=16384",
]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return load_shape(str(folder))


class Runs:
    """Configurations by their overrides, and what they come to on some GPUs."""

    def __init__(self, folder: Path, gpus: NamedGpus, *overrides: str) -> None:
        self._path = folder / "c.yaml"
        self._path.write_text(HEADER)
        self._overrides = overrides
        ids = tuple(map(str, range(gpus.count)))
        self._machine = Machine(gpu_ids=ids, num_cores=8)

    def change(self, words: Sequence[str]) -> Changed:
        config = load_config(self._path, [*self._overrides, *words])
        return Changed(config, resolve_run(config, self._machine, purpose="train"))


def _need(needs: Sequence[MemoryNeed], device: str) -> MemoryNeed:
    return next(need for need in needs if need.device.startswith(device))


def test_the_shape_is_the_published_one(shape: ModelShape) -> None:
    assert shape.num_parameters == shape.num_trained == WEIGHTS
    # Embeddings and head, 152,064 x 3,584 each, and the last norm.
    assert shape.root_parameters == 2 * 152_064 * 3_584 + 3_584
    assert shape.key_size == 4 * 128
    # Per layer: q and o 2 x 7,168, k and v 2 x 4,096, three matrices of 22,528.
    assert shape.count_adapter_parameters(16, None) == 16 * 28 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert shape.count_adapter_parameters(8, ["q_proj", "v_proj"]) == 8 * 28 * (7168 + 4096)


def test_frozen_weights_are_not_trained(tmp_path: Path) -> None:
    small = {**QWEN_7B, "hidden_size": 56, "intermediate_size": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(small))
    shape = load_shape(str(tmp_path), ["embeddings"])
    assert shape.num_parameters - shape.num_trained == 100 * 56


def test_a_trainer_alone_on_its_gpu(tmp_path: Path, shape: ModelShape) -> None:
    gpus = parse_gpus("H200:2")
    config, run = Runs(tmp_path, gpus, "train.gradient_checkpointing=true").change(())
    estimate = estimate_memory(config, run, shape, gpus)
    parts = _need(estimate.needs, "trainer").parts
    # 2 + 4 + 4 + 8 bytes for each weight.
    assert parts["weights"] == 2 * WEIGHTS
    assert parts["float32 masters"] == parts["gradients"] == 4 * WEIGHTS
    assert parts["AdamW"] == 8 * WEIGHTS
    # Each layer keeps what it begins with; one is computed again at a time.
    layer = 2 * (4 + 4) * 3584 + 2 * (3 * 3584 + 2 * 512) + 2 * 4 * 18944
    assert parts["activations"] == (28 * 2 * 3584 + layer) * 16384
    # 2 (keys, values) x 28 layers x 512 x 2 bytes.
    assert count_kv_bytes(config, shape) == 57_344
    server = _need(estimate.needs, "server")
    assert server.available == int(int(139.8 * GIB) * 0.9)
    room = server.available - 2 * WEIGHTS - 3 * GIB
    assert estimate.kv_cache_tokens == room // 57_344


def test_ranks_hold_shards(tmp_path: Path, shape: ModelShape) -> None:
    gpus = parse_gpus("H100:8")
    config, run = Runs(tmp_path, gpus).change(())
    assert len(run.trainers) == 7
    parts = _need(estimate_memory(config, run, shape, gpus).needs, "trainer").parts
    assert parts["weights"] == parts["gradients"] == 4 * WEIGHTS // 7
    assert parts["AdamW"] == 8 * WEIGHTS // 7
    root, layer = shape.root_parameters, shape.layer_parameters
    assert parts["layers put together"] == 2 * (root + 2 * layer) + 4 * root


def test_adapters_critics_and_references_count(tmp_path: Path, shape: ModelShape) -> None:
    gpus = parse_gpus("H200:2")
    words = ("model.lora.rank=16", "train.algorithm.kind=ppo")
    config, run = Runs(tmp_path, gpus, *words).change(())
    parts = _need(estimate_memory(config, run, shape, gpus).needs, "trainer").parts
    assert parts["weights"] == 2 * 2 * WEIGHTS
    assert parts["AdamW"] == 2 * 8 * 40_370_176
    kl = "train.algorithm.kl={place: loss, coef: 0.01}"
    config, run = Runs(tmp_path, gpus, kl).change(())
    parts = _need(estimate_memory(config, run, shape, gpus).needs, "trainer").parts
    assert parts["reference model"] == 2 * WEIGHTS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_what_the_backward_pass_keeps(tmp_path: Path, dtype: torch.dtype) -> None:
    """Measured on the trainer's own forward pass."""
    sizes: dict[str, Any] = {
        "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes))
    model.config.save_pretrained(tmp_path)
    name = str(dtype).removeprefix("torch.")
    words = ("engine.max_model_len=96", "train.micro_batch_tokens=96", f"model.dtype={name}")
    config: ExperimentConfig = Runs(tmp_path, parse_gpus("L4"), *words).change(()).config
    prepare_layers(model, torch.device("cpu"), config.train)
    model.to(dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        held.append(tensor)
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(
            input_ids=torch.zeros(1, 96, dtype=torch.long),
            position_ids=torch.arange(96)[None],
            use_cache=False,
            layout=AttentionLayout([Segment(0, 96, 96, 0)]),
        )
    estimated = count_activation_bytes(config, load_shape(str(tmp_path)))
    assert sum(kept.values()) == pytest.approx(estimated, rel=0.1)


@pytest.mark.parametrize(
    ("gpus", "words", "remedy"),
    [
        # 18 bytes for each of 7.6 billion weights are 128 GiB.
        ("H200:2", [], "train.gradient_checkpointing=true"),
        ("H100:2", [], "model.lora.rank=32"),
        ("H200:2", ["train.gradient_checkpointing=true"], None),
        ("H100:4", ["engine.num_servers=3"], "engine.num_servers=1"),
        # 0.45 x 39.4 GiB hold 14.2 GiB of weights and a cache of half a GiB.
        ("A100-40:2", _TIGHT_SERVER, "engine.max_model_len="),
        # Loading alone takes 28 GiB.
        ("4090:2", ["model.lora.rank=8"], "GPUs of more memory"),
        ("T4:2", [], "GPUs of more memory"),
    ],
)
def test_what_does_not_fit_gets_the_mildest_change(
    gpus: str, words: list[str], remedy: str | None, tmp_path: Path, shape: ModelShape
) -> None:
    named = parse_gpus(gpus)
    runs = Runs(tmp_path, named, *words)
    _, found = find_in_memory(runs.change, shape, named)
    errors = [finding for finding in found if finding.severity == "error"]
    assert bool(errors) == (remedy is not None)
    for error in errors:
        assert remedy is not None
        assert remedy in error.remedy
        if "=" in remedy:
            typed = error.remedy.removeprefix("Type ").split()
            changed = runs.change(typed)
            assert all(need.fits for need in estimate_memory(*changed, shape, named).needs)


def test_gpus_as_they_are_typed() -> None:
    assert parse_gpus("h100:8") == NamedGpus("h100", 8, int(79.1 * GIB))
    assert parse_gpus("80GB:2") == NamedGpus("80GB", 2, int(0.98 * 80 * GIB))
    assert parse_gpus("L4").count == 1


@pytest.mark.parametrize("text", ["H10:8", "H100:", "H100:0", "H100:x", "", ":8", "0GB:1"])
def test_what_is_no_gpu_is_refused(text: str) -> None:
    with pytest.raises(UserInputError, match="--gpu"):
        parse_gpus(text)
