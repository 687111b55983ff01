"""Publishing from a real learner to the real embedded engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import WeightMismatchError
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.models.pretrained import load_model
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.publish import build_probes, publish_and_verify

PROBES = [[5, 6, 7, 8], [9, 10], [11] * 20]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
async def engine(
    build_tiny_model: Callable[..., PreTrainedModel],
    tiny_tokenizer: PreTrainedTokenizerBase,
    tied: bool,
) -> AsyncIterator[EmbeddedEngine]:
    config = EngineConfig(max_model_len=128, num_threads=1)
    engine = EmbeddedEngine(build_tiny_model(tied=tied), tiny_tokenizer, config, model_name="tiny")
    yield engine
    await engine.close()


async def test_three_updates_are_published_and_verified(
    engine, build_tiny_model, build_config, build_trajectory, tied
):
    learner = Learner(build_tiny_model(tied=tied), build_config(learning_rate=3e-2))
    for version in (1, 2, 3):
        batch = [
            build_trajectory(f"g{version}", index, float(index), [([5, 6], [20 + index, 30])])
            for index in range(4)
        ]
        learner.update(batch, version - 1)
        metrics = await publish_and_verify(engine, learner, version, PROBES, 1e-4)
        assert metrics["probe_gap_max"] < 1e-4
    assert await engine.policy_version() == 3


async def test_a_real_model_in_bfloat16_is_verified(real_model, build_config):
    """Its rare tokens round by more than stale weights move likely ones.

    What is allowed follows from the processor's rounding, between 0.01 and 0.3 nats: that one stale
    layer is found shows that it is not too much.
    """
    model, tokenizer = load_model(str(real_model), "bfloat16", "cpu"), load_tokenizer(real_model)
    engine = EmbeddedEngine(
        model, tokenizer, EngineConfig(max_model_len=128, num_threads=1), model_name="real"
    )
    learner = Learner(load_model(str(real_model), "float32", "cpu"), build_config(dtype="bfloat16"))
    prompts = build_probes(tokenizer, 128)
    for version, text in enumerate(("", " The colours of the sea", " 17 + 25 = 42, so")):
        more = tokenizer.encode(text, add_special_tokens=False)
        metrics = await publish_and_verify(engine, learner, version, [p + more for p in prompts])
        assert metrics["probe_gap_mean"] < metrics["probe_tolerance"]
    published = learner.weights
    old = {n: t.clone() for n, t in published().items() if n.startswith("model.layers.7.")}
    learner.weights = lambda: published() | old
    with (
        learner.visibly_changed(),
        pytest.raises(WeightMismatchError, match="weighted by probability"),
    ):
        await publish_and_verify(engine, learner, 3, prompts)
    await engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", ["model.layers.1.", "lm_head.", "model.embed_tokens."])
async def test_what_never_loads_is_found_before_the_first_step(
    build_tiny_model, tiny_tokenizer, build_config, dtype, kept
):
    learner = Learner(build_tiny_model(tied=False), build_config(dtype=dtype))
    config = EngineConfig(max_model_len=128, num_threads=1)
    loaded = build_tiny_model(tied=False).to(getattr(torch, dtype))
    engine = EmbeddedEngine(loaded, tiny_tokenizer, config, model_name="tiny")
    own = {name: tensor.clone() for name, tensor in learner.weights().items()}
    stale = {name: tensor for name, tensor in own.items() if name.startswith(kept)}
    published = learner.weights
    with learner.visibly_changed():
        await publish_and_verify(engine, learner, 0, PROBES)
        learner.weights = lambda: published() | stale
        with pytest.raises(WeightMismatchError, match="does not hold") as caught:
            await publish_and_verify(engine, learner, 0, PROBES)
    # It is more than rounding: there is nothing to allow.
    assert "train.probe_tolerance" not in str(caught.value)
    learner.weights = published
    assert all(torch.equal(tensor, own[name]) for name, tensor in learner.weights().items())
    await publish_and_verify(engine, learner, 0, PROBES)
    await engine.close()


@pytest.mark.slow
async def test_temperature_and_top_p_agree(engine, build_tiny_model, build_config, tied):
    learner = Learner(build_tiny_model(tied=tied), build_config())
    sampling = Sampling(max_tokens=40, temperature=0.8, top_p=0.9, seed=1)
    for prompt in PROBES:
        found = await engine.generate(prompt, sampling)
        (expected,) = learner.compute_logprobs(
            [[*prompt, *found.completion_ids]], starts=[len(prompt)], temperature=0.8, top_p=0.9
        )
        assert found.rollout_logprobs == pytest.approx(expected, abs=1e-4)


async def test_one_stale_matrix_is_found(engine, build_tiny_model, build_config, tied):
    """What vLLM on CPU does to a tied head: everything is new except one matrix."""
    learner = Learner(build_tiny_model(1, tied=tied), build_config())
    published = learner.weights

    def stale() -> dict[str, torch.Tensor]:
        name = "model.layers.1.mlp.down_proj.weight"
        return published() | {name: torch.zeros_like(published()[name])}

    learner.weights = stale
    with pytest.raises(WeightMismatchError, match="does not hold the trainer's weights"):
        await publish_and_verify(engine, learner, 1, PROBES, 1e-3)
