"""The critic of ``train.algorithm.advantage`` ``gae``."""

from __future__ import annotations

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


class CriticConfig(StrictConfig):
    """A second model, which learns what to expect. It is trained as ``train`` says (optimizer,
    schedule, minibatches, epochs), with a learning rate of its own. It has the memory of a second
    policy; with ``model.lora`` it is an adapter of its own."""

    path: str | None = None
    """Hub id, folder or ``builtin:`` name of the model that it starts from, with the policy's
    tokenizer; null: ``model.path``. Its value head starts at 0."""
    learning_rate: float = Field(1.0e-5, gt=0.0)
    """Peak; warm-up and decay are those of ``train.learning_rate``."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which the critic alone learns."""
    clip_range: float | None = Field(0.2, gt=0.0)
    """How far values may move in a step, in units of the reward; null: any distance."""
