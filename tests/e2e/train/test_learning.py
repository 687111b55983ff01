"""The whole path, from agent to trainer, learns what it is rewarded for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl_cli import PPOTrainer, RolloutWorkflow, TrackingClient, load_config


def compute_probabilities(folder: Path, question: str) -> torch.Tensor:
    """Of every token, as the first of a reply: by transformers alone."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    with torch.no_grad():
        return model(ids).logits[0, -1].softmax(-1)


class WantsOneToken(RolloutWorkflow):
    """Rewards a reply that begins with the wanted token."""

    def __init__(self, tokenizer: Any, wanted_id: int) -> None:
        self._tokenizer = tokenizer
        self._wanted_id = wanted_id

    async def arun_episode(self, engine: Any, data: Any) -> Any:
        client = TrackingClient(engine=engine, tokenizer=self._tokenizer)
        message = {"role": "user", "content": data["question"]}
        await client.chat.completions.create(model="m", messages=[message], max_tokens=1)  # type: ignore[list-item]
        [interaction] = client.interactions
        client.set_final_reward(interaction.completion_ids[0] == self._wanted_id)
        client.apply_reward_discount()
        await client.close()
        return client.export_interactions("individual")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_probability_of_the_wanted_token_rises_above_nine_tenths(
    project: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    question = "Say it."
    before = compute_probabilities(model_folder, question)
    # One that is sampled now and then: what never happens cannot be rewarded.
    wanted_id = int((before - 0.03).abs().argmin())
    assert before[wanted_id] < 0.1
    config = load_config(
        "experiment.yaml",
        [
            "gconfig.n_samples=16",
            "rollout.max_staleness=0",
            "train.total_steps=30",
            "train.learning_rate=3e-3",
        ],
    )
    rows = [{"question": question}] * 4
    with PPOTrainer(config, train_dataset=rows) as trainer:
        assert trainer.train(WantsOneToken(trainer.tokenizer, wanted_id))
        checkpoint = trainer.run_dir / "checkpoints" / "step-000030"
    after = compute_probabilities(checkpoint, question)
    assert after[wanted_id] > 0.9
