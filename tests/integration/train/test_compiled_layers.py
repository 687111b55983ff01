"""Layers compiled by torch.compile: the same updates, for all lengths by the same code."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from agentrl_cli.errors import ModelError
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.model.layers import _try_compiler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("g++") is None and shutil.which("clang++") is None,
        reason="needs a C++ compiler",
    ),
    # torch's compiler imports parts of torch that are deprecated, and hides another warning of its
    # own where it would be shown, which is too late where warnings are errors.
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    _try_compiler.cache_clear()
    yield
    torch._dynamo.reset()


def count_compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture
def make_learner(build_model: Any, build_config: Any) -> Any:
    def make(**train: Any) -> Learner:
        # Without it Adam makes whole steps of what rounding leaves where a gradient is 0.
        config = build_config(adam_epsilon=1e-3, **train)
        return Learner(
            build_model(),
            config,
            reference_model=build_model(3),
            critic_model=build_model(4) if config.train.critic else None,
        )

    return make


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"algorithm": {"kl": {"coef": 0.1}}, "num_epochs": 2}, id="reference"),
        pytest.param({"gradient_checkpointing": True, "num_epochs": 2}, id="checkpointing"),
        pytest.param({"algorithm": {"kind": "ppo"}, "packing": "plain"}, id="critic"),
        # Every further one is compiled, for seconds.
        pytest.param({"model": {"lora": {"target_modules": ["q_proj"]}}}, id="adapter"),
    ],
)
def test_updates_are_those_of_layers_as_they_are(make_learner, ragged_batch, settings):
    if "model" in settings:
        pytest.importorskip("peft", reason="needs peft (extra lora)")
    plain, compiled = make_learner(**settings), make_learner(**settings, compile="layers")
    num_before = count_compilations()
    for version in range(2):
        expected = plain.update(ragged_batch, version)
        assert version or count_compilations() == num_before
        metrics = compiled.update(ragged_batch, version)
        assert metrics.keys() == expected.keys()
        for name in metrics.keys() - {"train_seconds", "logprob_seconds"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert count_compilations() > num_before
    for name, tensor in plain.weights().items():
        found = compiled.weights()[name]
        torch.testing.assert_close(found, tensor, atol=5e-6, rtol=0.0, msg=name)
    [expected_logprobs] = plain.compute_logprobs([[1, 2, 3, 4]])
    [logprobs] = compiled.compute_logprobs([[1, 2, 3, 4]])
    assert logprobs == pytest.approx(expected_logprobs, abs=2e-5)


def test_no_length_is_compiled_by_itself(make_learner, build_trajectory):
    learner = make_learner(compile="layers", micro_batch_tokens=100_000)

    def update(length: int) -> None:
        sampled = [[(5 * number + i) % 97 for i in range(length)] for number in range(2)]
        batch = [
            build_trajectory("g", i, float(i), [([7, 8], ids)]) for i, ids in enumerate(sampled)
        ]
        learner.update(batch, 0)
        learner.compute_logprobs(sampled)

    num_before = count_compilations()
    update(10)
    after_one = count_compilations()
    assert after_one > num_before
    for length in (3, 11, 64, 150):
        update(length)
    assert count_compilations() == after_one


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "no-such-compiler"),
        # It is there, and cannot work.
        (
            'case "$*" in *--version*) exec c++ "$@";; esac; echo no space left >&2; exit 1',
            "no space",
        ),
    ],
)
def test_without_a_compiler_that_works_it_is_said_before_anything_runs(
    make_learner, tmp_path, script, said
):
    path = tmp_path / "no-such-compiler"
    if script is not None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, str(path))}),
        pytest.raises(ModelError, match=f"(?s){said}.*install one.*train\\.compile=null") as info,
    ):
        make_learner(compile="layers")
    assert len(str(info.value)) < 700
    assert "TORCHDYNAMO" not in str(info.value)
