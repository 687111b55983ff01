"""Which groups are trained on, and which tasks come more often: both off unless they are set."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


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
