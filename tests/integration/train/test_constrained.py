"""What the engine sampled under a structural tag, the trainer computes the same logprobs of."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.train.learner import Learner

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["sum", "product"]}},
    "required": ["name", "kind"],
}
TAG = json.dumps(
    {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
)


@pytest.fixture
async def batch(build_tiny_model: Any, tiny_tokenizer: Any) -> list[Trajectory]:
    """Groups of two whose turns were held to the schema, to nothing, and to it with a nucleus."""
    config = EngineConfig.model_validate({"max_model_len": 256, "num_threads": 1})
    engine = EmbeddedEngine(build_tiny_model(), tiny_tokenizer, config, model_name="tiny")
    samplings = [
        Sampling(max_tokens=40, structural_tag=TAG),
        Sampling(max_tokens=10),
        Sampling(max_tokens=40, structural_tag=TAG, temperature=0.7, top_p=0.8),
    ]
    prompt = tiny_tokenizer.encode("What is 12 plus 34?")

    async def run(group: int, index: int) -> Trajectory:
        identity, history, interactions = f"{group}/{index}", list(prompt), []
        for turn, sampling in enumerate(samplings):
            # By chance a token at the edge of the nucleus is in it on one side alone.
            seeded = replace(sampling, seed=100 * group + 10 * index + turn)
            generation = await engine.generate(history, seeded)
            interactions.append(
                Interaction(
                    id=f"{identity}/{turn}",
                    parent_id=interactions[-1].id if interactions else None,
                    extends_parent=bool(interactions),
                    prompt_ids=tuple(history),
                    completion_ids=generation.completion_ids,
                    rollout_logprobs=generation.rollout_logprobs,
                    versions=generation.versions,
                    structural_tag=sampling.structural_tag,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    started=turn,
                    turn_return=float(index),
                )
            )
            history += [*generation.completion_ids, *prompt[:3]]
        return Trajectory(
            id=identity,
            group_id=str(group),
            task_id=str(group),
            sample_index=index,
            interactions=tuple(interactions),
            reward=float(index),
        )

    try:
        return await asyncio.gather(*(run(group, index) for group in range(3) for index in (0, 1)))
    finally:
        await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("export_style", ["concat", "individual"])
@pytest.mark.parametrize("num_epochs", [1, 2])
async def test_the_trainers_logprobs_are_the_rollouts(
    batch, build_tiny_model, tiny_tokenizer, build_config, export_style, num_epochs
) -> None:
    config = build_config(export_style=export_style, num_epochs=num_epochs, learning_rate=1e-9)
    learner = Learner(build_tiny_model(), config, tokenizer=tiny_tokenizer)
    metrics = learner.update(batch, 0)
    assert metrics["logprob_gap_max"] < 1e-4
    assert metrics["grad_norm"] > 0
    # Without the tags, the same tokens look far less likely than they were.
    bare = [
        replace(t, interactions=tuple(replace(i, structural_tag=None) for i in t.interactions))
        for t in batch
    ]
    learner = Learner(build_tiny_model(), config, tokenizer=tiny_tokenizer)
    assert learner.update(bare, 0)["logprob_gap_max"] > 0.5


@pytest.mark.slow
async def test_tokens_that_a_tag_does_not_allow_are_not_trained_on(
    batch, build_tiny_model, tiny_tokenizer, build_config, caplog
) -> None:
    first = batch[1].interactions[0]
    wrong = replace(first, completion_ids=(first.completion_ids[0],) * len(first.completion_ids))
    damaged = [replace(batch[1], interactions=(wrong,)), *batch[:1], *batch[2:]]
    learner = Learner(build_tiny_model(), build_config(), tokenizer=tiny_tokenizer)
    metrics = learner.update(damaged, 0)
    assert metrics["logprob_gap_max"] < 1e-4
    assert f"interaction {first.id}: its tokens are not allowed" in caplog.text
    assert all(torch.isfinite(p).all() for p in learner.model.parameters())


@pytest.mark.slow
async def test_a_learner_without_a_tokenizer_says_what_it_needs(
    batch, build_tiny_model, build_config
) -> None:
    with pytest.raises(ValueError, match="mask_maker"):
        Learner(build_tiny_model(), build_config()).update(batch, 0)
