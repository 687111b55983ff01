"""Tables: the steps of a run, and the trajectories of a selection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table
from rich.text import Text

from agentrl_cli.breaks import BreakSummary
from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.breaks_view import format_broken
from agentrl_cli.inspector.query import Found, Source, list_sources
from agentrl_cli.inspector.text import format_number, one_line
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import TrajectorySummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """One stored file of trajectories in numbers; all None where it cannot be read."""

    source: Source
    num_trajectories: int | None = None
    reward_mean: float | None = None
    num_unscored: int | None = None
    num_failed: int | None = None
    num_replaced_groups: int | None = None
    turns_mean: float | None = None
    tokens_mean: float | None = None
    breaks: BreakSummary = field(default_factory=BreakSummary)
    alarms: tuple[str, ...] = ()
    """Those that rang in the step."""
    problem: str | None = None


def summarize_steps(folder: RunFolder) -> list[StepSummary]:
    """Every step and evaluation of a run."""
    summaries = []
    alarms = folder.read_alarms()
    for source in list_sources(folder):
        names = () if source.is_eval else tuple(alarms.get(source.step, ()))
        try:
            summaries.append(_summarize(source, source.summarize(folder), names))
        except AgentrlError as error:
            summaries.append(StepSummary(source=source, problem=str(error)))
    return summaries


def build_step_table(summaries: Sequence[StepSummary]) -> Table:
    """One row a step; its replaced groups and its alarms, where the run had any."""
    table = Table(box=None)
    names = ["", "trajectories", "reward", "unscored", "failed", "turns", "tokens", "broken"]
    has_replaced = any(s.num_replaced_groups for s in summaries)
    has_alarms = any(s.alarms for s in summaries)
    for name in [*names, "replaced groups"] if has_replaced else names:
        table.add_column(name, justify="left" if not name else "right")
    if has_alarms:
        table.add_column("alarms", overflow="fold")
    for s in summaries:
        if s.problem is not None:
            table.add_row(s.source.name, Text("damaged", style="red"))
            continue
        table.add_row(
            s.source.name,
            str(s.num_trajectories),
            format_number(s.reward_mean),
            str(s.num_unscored),
            str(s.num_failed),
            format_number(s.turns_mean, 1),
            format_number(s.tokens_mean, 1),
            format_broken(s.breaks),
            *([str(s.num_replaced_groups)] if has_replaced else []),
            *([Text(" ".join(s.alarms), style="red")] if has_alarms else []),
        )
    return table


def build_trajectory_table(found: Sequence[Found]) -> Table:
    """One row a trajectory, numbered from 1."""
    table = Table(box=None)
    right = ("#", "reward", "turns", "tools", "tokens", "seconds", "broken")
    names = (
        *("#", "id", "from", "task", "reward", "turns", "tools", "tokens", "seconds"),
        *("broken", "failure", "answer"),
    )
    for name in names:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name in ("#", "id"),
            overflow="fold" if name == "id" else "ellipsis",
        )
    for number, item in enumerate(found, start=1):
        s = item.summary
        table.add_row(
            str(number),
            Text(s.id),
            Text(item.source.name + (" (replaced)" if s.replaced_by is not None else "")),
            Text(s.task_id),
            format_number(s.reward),
            str(s.num_turns),
            str(s.num_tool_calls),
            str(s.num_completion_tokens),
            f"{s.seconds:.1f}",
            format_broken(s.breaks),
            Text(s.failure_boundary.value if s.failure_boundary else "", style="red"),
            Text(one_line(s.final_answer or s.failure_message or "", 40)),
        )
    return table


def _summarize(
    source: Source, trajectories: Sequence[TrajectorySummary], alarms: tuple[str, ...]
) -> StepSummary:
    rewards = [t.reward for t in trajectories if t.reward is not None and not math.isnan(t.reward)]
    return StepSummary(
        source=source,
        num_trajectories=len(trajectories),
        reward_mean=_mean(rewards),
        num_unscored=len(trajectories) - len(rewards),
        num_failed=sum(t.failure_boundary is not None for t in trajectories),
        num_replaced_groups=len({t.group_id for t in trajectories if t.replaced_by is not None}),
        turns_mean=_mean([t.num_turns for t in trajectories]),
        tokens_mean=_mean([t.num_completion_tokens for t in trajectories]),
        breaks=sum((t.breaks for t in trajectories), BreakSummary()),
        alarms=alarms,
    )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
