"""The conversations of a run's trajectories, as rows that ``agentrl sft`` reads."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.exports.export_selection import ExportSelection
from agentrl_cli.inspector.trajectory_query import choose_sources
from agentrl_cli.records import InteractionStatus, Trajectory
from agentrl_cli.store.atomic_files import atomic_file
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import iterate_trajectory_file


@dataclass(frozen=True, slots=True)
class ExportedConversations:
    """What was written."""

    num_rows: int
    num_tasks: int
    """Tasks with at least one row."""
    num_trajectories: int
    """Those that were looked at."""


def export_conversations(
    run: str | Path, to: Path, selection: ExportSelection | None = None
) -> ExportedConversations:
    """Writes ``to``, a JSONL file with a row ``{"messages": [...], "tools": [...]}`` for each
    conversation of the trajectories that succeeded.

    Left out are trajectories that failed, have no reward or a lower one than is asked for, those
    whose last reply was cut short, and conversations that are there already. A conversation is what
    the last call of a branch was asked, with its reply. With ``max_per_task`` the best of a task
    come first.

    Raises:
        UserInputError: no such run, step or evaluation, or no trajectory that may be exported.
        StoreError: a file cannot be read or written.
    """
    folder, selection = RunFolder.open(run), selection or ExportSelection()
    kept: list[_Candidate] = []
    left_out = Counter[str]()
    for source in choose_sources(folder, selection.query):
        for trajectory in iterate_trajectory_file(source.find_file(folder)):
            reason = _find_reason(trajectory, selection.min_reward)
            if reason is None:
                rows = [*map(_format_row, list_conversations(trajectory))]
                kept.append(_Candidate(trajectory.reward or 0.0, trajectory.task_id, rows))
            else:
                left_out[reason] += 1
    if not kept:
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.most_common())
        raise UserInputError(
            f"{folder.location}: none of {left_out.total()} trajectories can be exported: {reasons}"
        )
    # Stable: equal ones stay in the order in which they were sampled.
    kept.sort(key=lambda candidate: -candidate.reward)
    rows_written: dict[bytes, None] = {}
    num_by_task = Counter[str]()
    for candidate in kept:
        limit = selection.max_per_task
        if limit is not None and num_by_task[candidate.task_id] >= limit:
            continue
        new = [row for row in candidate.rows if row not in rows_written]
        rows_written |= dict.fromkeys(new)
        num_by_task[candidate.task_id] += bool(new)
    with atomic_file(to) as file:
        file.writelines(rows_written)
    num_trajectories = len(kept) + left_out.total()
    return ExportedConversations(len(rows_written), len(+num_by_task), num_trajectories)


class _Candidate(NamedTuple):
    """What is kept of a trajectory until all are ranked: its tokens would fill the memory."""

    reward: float
    task_id: str
    rows: list[bytes]


def list_conversations(trajectory: Trajectory) -> list[dict[str, Any]]:
    """One row for each call that no other continues: what it was asked, and what it replied."""
    done = [i for i in trajectory.interactions if i.status is InteractionStatus.COMPLETED]
    continued = {i.parent_id for i in done}
    return [
        {"messages": [*i.messages, i.reply]} | ({"tools": list(i.tools)} if i.tools else {})
        for i in done
        if i.id not in continued and i.reply is not None
    ]


def _format_row(row: dict[str, Any]) -> bytes:
    # Half of a surrogate pair, which agentrl sft refuses, becomes a question mark.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _find_reason(trajectory: Trajectory, min_reward: float | None) -> str | None:
    """Why a trajectory is no example; None: it is one."""
    if trajectory.failure is not None:
        return "failed"
    if trajectory.known_reward is None:
        return "without a reward"
    if trajectory.is_cut_short:
        return "with a last reply that was cut short"
    if min_reward is not None and trajectory.known_reward < min_reward:
        return f"with a reward below {min_reward:g}"
    return None
