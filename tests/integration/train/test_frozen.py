"""Frozen weights on a tiny model: what moves, what is clipped, saved and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from agentrl_cli.config.experiment import ModelConfig
from agentrl_cli.errors import ModelError
from agentrl_cli.train.learner import Learner

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def make_learner(build_model, build_config):
    def make(
        *frozen: str, tied: bool = False, dtype: str = "float32", seed: int = 0, **train: Any
    ) -> Learner:
        config = build_config(dtype=dtype, model={"frozen": list(frozen)}, **train)
        return Learner(build_model(seed, tied=tied), config)

    return make


def find_moved(learner: Learner, batch: Any) -> tuple[set[str], dict[str, float]]:
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    metrics = learner.update(batch, 0)
    after = learner.weights()
    return {name for name in before if not torch.equal(before[name], after[name])}, metrics


@pytest.mark.parametrize(
    ("frozen", "kept"),
    [
        (("embeddings",), {EMBEDDINGS}),
        (("head",), {HEAD}),
        (("embeddings", "lm_*"), {EMBEDDINGS, HEAD}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_named_parts_stay_and_the_rest_moves(make_learner, ragged_batch, frozen, kept, dtype):
    learner = make_learner(*frozen, dtype=dtype)
    everything = set(learner.weights())
    moved, _ = find_moved(learner, ragged_batch)
    assert moved == everything - kept
    optimizer = learner._policy.optimizer
    assert kept.isdisjoint(optimizer.master_weights())
    assert not any(name.startswith(tuple(kept)) for name in optimizer.state_tensors())


def test_patterns_name_layers(make_learner, ragged_batch):
    learner = make_learner("model.layers.0.*", "*norm.weight")
    moved, _ = find_moved(learner, ragged_batch)
    assert moved
    assert not any(".layers.0." in name or "norm" in name for name in moved)
    assert any(".layers.1." in name for name in moved)


@pytest.mark.parametrize("part", ["embeddings", "head"])
def test_tied_embeddings_and_head_are_one(make_learner, ragged_batch, part):
    moved, _ = find_moved(make_learner(part, tied=True), ragged_batch)
    assert moved
    assert EMBEDDINGS not in moved


def test_the_gradient_is_that_of_the_trained_weights_alone(make_learner, ragged_batch):
    """Frozen weights are no part of the norm, and change nothing of the others' gradient."""
    full, part = make_learner(max_grad_norm=1e9), make_learner("embeddings", max_grad_norm=1e9)
    norms = {}
    for name, learner in (("full", full), ("part", part)):
        states = {}
        learner._policy.optimizer.step = lambda _, own=learner, out=states: out.update(
            {n: p.grad.clone() for n, p in own.model.named_parameters() if p.grad is not None}
        )
        norms[name] = learner.update(ragged_batch, 0)["grad_norm"], states
    assert EMBEDDINGS in norms["full"][1]
    assert EMBEDDINGS not in norms["part"][1]
    for name, gradient in norms["part"][1].items():
        torch.testing.assert_close(gradient, norms["full"][1][name], atol=1e-6, rtol=1e-5)
    expected = torch.stack([g.norm() for g in norms["part"][1].values()]).norm()
    assert norms["part"][0] == pytest.approx(float(expected), rel=1e-5)
    assert norms["part"][0] < norms["full"][0]


@pytest.mark.parametrize("frozen", [(), ("embeddings",), ("model.layers.0.*",)])
def test_gradient_checkpointing_changes_nothing(make_learner, ragged_batch, frozen):
    """With frozen embeddings the first layer's input has no gradient."""
    plain = make_learner(*frozen, num_epochs=2)
    thrifty = make_learner(*frozen, num_epochs=2, gradient_checkpointing=True)
    plain_metrics, thrifty_metrics = (one.update(ragged_batch, 0) for one in (plain, thrifty))
    assert thrifty_metrics["grad_norm"] == pytest.approx(plain_metrics["grad_norm"], rel=1e-5)
    expected = plain.weights()
    for name, tensor in thrifty.weights().items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("embedings", r"model\.frozen: 'embedings'.*mean 'embeddings'"),
        ("model.layer.0.*", r"'model\.layer\.0\.\*' matches no weight.*model\.layers"),
        ("*", r"model\.frozen: \* leaves nothing of Qwen2ForCausalLM"),
    ],
)
def test_what_cannot_be_frozen_is_refused(make_learner, name, said):
    with pytest.raises(ModelError, match=said):
        make_learner(name)


def test_with_an_adapter_it_is_refused():
    with pytest.raises(ValidationError, match="nothing but the adapter is trained anyway"):
        ModelConfig.model_validate({"path": "none", "lora": {}, "frozen": ["embeddings"]})
