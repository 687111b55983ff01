"""What the attempts at a task showed of it: does it teach anything at this moment?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentrl_cli.scores import compute_statistics


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """How the trajectories of one group scored."""

    group_id: str
    task_id: str
    has_signal: bool | None
    """False: all scored alike; None: fewer than two were scored, which shows nothing."""


def list_outcomes(scores: Iterable[tuple[str, str, float | None]]) -> list[GroupOutcome]:
    """The outcome of every group, from (group id, task id, score) of its trajectories."""
    groups: dict[tuple[str, str], list[float]] = {}
    for group_id, task_id, score in scores:
        groups.setdefault((group_id, task_id), []).extend(() if score is None else (score,))
    outcomes = []
    for (group_id, task_id), known in groups.items():
        has_signal = compute_statistics(known).has_signal if len(known) > 1 else None
        outcomes.append(GroupOutcome(group_id, task_id, has_signal))
    return outcomes
