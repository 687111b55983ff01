"""Which groups are trained on, and which tasks come less often: both off unless they are set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.algorithm import AlgorithmConfig
from agentrl_cli.config.base import StrictConfig
from agentrl_cli.errors import ConfigError


class ReplaceGroupsConfig(StrictConfig):
    """Groups whose trajectories all scored alike teach nothing: other tasks take their place in
    the batch (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2). They are kept in the run
    folder and counted in ``reward_mean``. Not for shaped rewards: see docs/how-it-works.md."""

    kind: Literal["replace_groups_without_signal"]
    max_replaced_groups: int | None = Field(None, ge=1)
    """Most groups of one step that are replaced; those without signal beyond it stay in the
    batch. null: ``train_dataset.batch_size``."""


class RestTasksConfig(StrictConfig):
    """A task whose group scored alike (solved always, or never) is left out of the next epochs:
    of one after the first time, of two, four, ... when it happens again, until its scores differ.
    See docs/how-it-works.md."""

    kind: Literal["rest_tasks_without_signal"]
    max_rest_epochs: int = Field(4, ge=1)
    """Most epochs in a row that a task is left out of: no task is left out for ever."""


def check_groups_are_compared(
    replacing: ReplaceGroupsConfig | None,
    curriculum: RestTasksConfig | None,
    *,
    algorithm: AlgorithmConfig,
    n_samples: int,
) -> None:
    """Refuses to judge groups by scores that say nothing about them.

    Raises:
        ConfigError: groups of one, or a filter for an algorithm that learns from groups whose
            scores are equal.
    """
    for key, chosen in (("filter", replacing), ("curriculum", curriculum)):
        if chosen is not None and n_samples == 1:
            raise ConfigError(
                f"rollout.{key}.kind: {chosen.kind} compares the scores of a group, and "
                "gconfig.n_samples is 1. Allowed: 2 or more. Type gconfig.n_samples=8, or "
                f"rollout.{key}=null"
            )
    if replacing is not None and not algorithm.compares_within_groups:
        raise ConfigError(
            f"rollout.filter.kind: {replacing.kind} replaces groups whose scores are equal, and "
            f"train.algorithm.advantage.kind {algorithm.advantage.kind} learns from them as from "
            "others. Type rollout.filter=null, or train.algorithm.kind=grpo"
        )
