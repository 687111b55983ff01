"""What the trainer's speed is compared with makes the same update."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.config.algorithm_config import GrpoAdvantageConfig
from agentrl_cli.train.data.samples import assign_advantages, build_samples
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.loss.advantages import compute_advantages
from benchmarks import train_rivals
from benchmarks.train_batches import VOCABULARY_SIZE, build_trajectory

#: TRL warns of versions of vLLM that it does not know, of peft, and of itself.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RIVALS: dict[str, Callable[[], Any]] = {
    "padded": lambda: train_rivals.PaddedLoop("float32", 64),
    "one at a time": lambda: train_rivals.OneAtATimeLoop("float32"),
    "TRL": lambda: train_rivals.TrlLoop("float32"),
}


def build_small_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_makes_the_same_update(monkeypatch, build_config, name: str):
    if name == "TRL" and (missing := train_rivals.find_missing_trl()) is not None:
        pytest.skip(missing)
    monkeypatch.setattr(train_rivals, "build_model", build_small_model)
    chance = random.Random(1)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(chance.choices(range(2, VOCABULARY_SIZE), k=count))

    prompt = draw(7)
    # Five rows are more than one pass of TRL's, of which the last is not full.
    batch = [
        build_trajectory(0, index, [(prompt, draw(3 + index)), *[(draw(2), draw(5))] * index])
        for index in range(5)
    ]
    samples = assign_advantages(
        build_samples(batch, "concat"), compute_advantages(batch, GrpoAdvantageConfig())
    )
    learner = Learner(build_small_model(), build_config(algorithm={"rollout_correction": None}))
    rival = RIVALS[name]()
    expected = learner.update(batch, 0)["grad_norm"]
    assert expected > 0.01
    assert rival.update(samples) == pytest.approx(expected, rel=1e-4)
    model = rival._trainer.model if name == "TRL" else rival.model
    fresh = build_small_model().state_dict()
    assert any(not torch.equal(fresh[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
