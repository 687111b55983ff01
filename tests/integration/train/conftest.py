"""A tiny random Qwen2, and trajectories to train it on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction, Trajectory

VOCABULARY_SIZE = 97

ModelFactory = Callable[..., Qwen2ForCausalLM]
ConfigFactory = Callable[..., ExperimentConfig]
TrajectoryFactory = Callable[..., Trajectory]


@pytest.fixture(scope="session")
def build_model() -> ModelFactory:
    """Builds the same model for the same seed; grouped queries unless told otherwise."""

    def build(seed: int = 0, *, tied: bool = False, **changes: Any) -> Qwen2ForCausalLM:
        settings: dict[str, Any] = {
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "initializer_range": 0.3,
        }
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**(settings | changes))).eval()

    return build


@pytest.fixture(scope="session")
def build_config() -> ConfigFactory:
    """A float32 configuration; ``model`` is added to that section, other arguments go into
    ``train``."""

    def build(
        *, dtype: str = "float32", export_style: str = "concat", model: Any = None, **train: Any
    ) -> ExperimentConfig:
        return ExperimentConfig.model_validate(
            {
                "experiment_name": "test",
                "model": {"path": "none", "dtype": dtype, **(model or {})},
                "workflow_path": "none.none",
                "gconfig": {"max_tokens": 16},
                "rollout": {"export_style": export_style},
                "train_dataset": {"path": "none"},
                "train": {"learning_rate": 1e-2, "micro_batch_tokens": 64, **train},
            }
        )

    return build


@pytest.fixture(scope="session")
def build_trajectory() -> TrajectoryFactory:
    """A trajectory whose every turn extends the one before it."""

    def build(
        group: str,
        index: int,
        reward: float | None,
        turns: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        logprob: float = -4.0,
        version: int = 0,
        **interaction: Any,
    ) -> Trajectory:
        identity = f"{group}/{index}"
        interactions: list[Interaction] = []
        history: tuple[int, ...] = ()
        for turn, (new_ids, completion_ids) in enumerate(turns):
            prompt_ids = history + tuple(new_ids)
            interactions.append(
                Interaction(
                    id=f"{identity}/{turn}",
                    parent_id=interactions[-1].id if interactions else None,
                    extends_parent=bool(interactions),
                    prompt_ids=prompt_ids,
                    completion_ids=tuple(completion_ids),
                    rollout_logprobs=(logprob,) * len(completion_ids),
                    versions=(version,) * len(completion_ids),
                    started=turn,
                    turn_return=reward,
                    **interaction,
                )
            )
            history = prompt_ids + tuple(completion_ids)
        return Trajectory(
            id=identity,
            group_id=group,
            task_id=group,
            sample_index=index,
            interactions=tuple(interactions),
            reward=reward,
        )

    return build


@pytest.fixture(scope="session")
def ragged_batch(build_trajectory: TrajectoryFactory) -> list[Trajectory]:
    """Three groups of three with lengths from 4 to 40, one group without signal and one
    trajectory unscored."""
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY_SIZE, (count,), generator=generator).tolist()

    batch = []
    for group, rewards in enumerate([(0.0, 1.0, 0.5), (1.0, 1.0, 1.0), (0.0, 1.0, None)]):
        for index, reward in enumerate(rewards):
            turns = [(ids(2 + 3 * index), ids(2 + group + turn)) for turn in range(1 + index)]
            batch.append(build_trajectory(f"g{group}", index, reward, turns))
    return batch
