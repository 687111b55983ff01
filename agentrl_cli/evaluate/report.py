"""Trajectories to a report, and two reports to a comparison: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from agentrl_cli.breaks import BreakSummary, summarize_breaks
from agentrl_cli.evaluate.statistics import (
    Interval,
    compute_clustered_interval,
    compute_mean,
    compute_pass_at_k,
)
from agentrl_cli.records import Trajectory

#: Rewards that fall short of the threshold by rounding alone do pass.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long something was: mean, median and largest over the trajectories."""

    mean: float
    median: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What an evaluation found. ``to_dict`` and ``from_dict`` are each other's inverse."""

    num_tasks: int
    num_trajectories: int
    num_unscored: int
    """Trajectories without a reward (or with NaN): out of the mean, and counted as not passed."""
    mean_reward: float | None
    """Over scored trajectories; None: nothing was scored."""
    interval: Interval | None
    """95 %, clustered by task; None: fewer than two scored tasks."""
    pass_threshold: float
    pass_at_k: Mapping[int, float]
    completion_tokens: Lengths | None
    turns: Lengths | None
    tool_calls: Lengths | None
    seconds: Lengths | None
    num_cut_short: int
    """Trajectories whose last reply was stopped by its token limit."""
    failures: Mapping[str, int]
    """Boundary to number of trajectories, most frequent first."""
    breaks: BreakSummary
    """Turns whose tokens could not continue an earlier turn, and what that cost."""
    task_rewards: Mapping[str, float]
    """Task id to its mean reward, for comparisons."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        data = asdict(self)
        data["pass_at_k"] = {str(k): v for k, v in self.pass_at_k.items()}
        data["interval"] = list(self.interval) if self.interval else None
        data["breaks"] = self.breaks.to_dict()
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The report that ``to_dict`` wrote.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is no such report.
        """
        values = {name: data[name] for name in cls.__dataclass_fields__}
        values["pass_at_k"] = {int(k): v for k, v in values["pass_at_k"].items()}
        if values["interval"] is not None:
            low, high = values["interval"]
            values["interval"] = (low, high)
        for name in ("completion_tokens", "turns", "tool_calls", "seconds"):
            if values[name] is not None:
                values[name] = Lengths(**values[name])
        values["breaks"] = BreakSummary.from_dict(values["breaks"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The change of the mean reward from one report to another, on the tasks of both."""

    num_tasks: int
    before: float
    after: float
    difference: float
    interval: Interval | None
    """95 % of the difference, paired by task; None: fewer than two tasks in common."""
    num_improved: int
    num_worse: int


def build_report(
    trajectories: Sequence[Trajectory],
    *,
    k_values: Sequence[int] = (1,),
    pass_threshold: float = 1.0,
) -> EvalReport:
    """The report of an evaluation; ``k_values`` larger than the attempts per task are left out."""
    rewards: dict[str, list[float]] = {}
    outcomes: dict[str, list[bool]] = {}
    for t in trajectories:
        scored = _is_scored(t)
        rewards.setdefault(t.task_id, [])
        if scored and t.reward is not None:
            rewards[t.task_id].append(t.reward)
        passed = scored and t.reward is not None and t.reward >= pass_threshold - _ROUNDING
        outcomes.setdefault(t.task_id, []).append(passed)
    at_k = {k: compute_pass_at_k(outcomes, k) for k in sorted(set(k_values))}
    failures = Counter(t.failure.boundary.value for t in trajectories if t.failure is not None)
    return EvalReport(
        num_tasks=len(outcomes),
        num_trajectories=len(trajectories),
        num_unscored=sum(not _is_scored(t) for t in trajectories),
        mean_reward=compute_mean([r for values in rewards.values() for r in values]),
        interval=compute_clustered_interval(list(rewards.values())),
        pass_threshold=pass_threshold,
        pass_at_k={k: value for k, value in at_k.items() if value is not None},
        completion_tokens=_measure([t.num_completion_tokens for t in trajectories]),
        turns=_measure([t.num_turns for t in trajectories]),
        tool_calls=_measure([t.num_tool_calls for t in trajectories]),
        seconds=_measure([t.seconds for t in trajectories]),
        num_cut_short=sum(_is_cut_short(t) for t in trajectories),
        failures=dict(failures.most_common()),
        breaks=summarize_breaks(trajectories),
        task_rewards={
            task: mean for task, r in rewards.items() if (mean := compute_mean(r)) is not None
        },
    )


def compare_reports(before: EvalReport, after: EvalReport) -> Comparison | None:
    """The change from ``before`` to ``after``, paired by task; None without tasks in common.

    With d_t the difference of a task's mean rewards, the interval is the t interval of the
    mean of d_t: what makes tasks differ from each other cancels.
    """
    tasks = [t for t in before.task_rewards if t in after.task_rewards]
    if not tasks:
        return None
    differences = [after.task_rewards[t] - before.task_rewards[t] for t in tasks]
    mean_before = math.fsum(before.task_rewards[t] for t in tasks) / len(tasks)
    mean_after = math.fsum(after.task_rewards[t] for t in tasks) / len(tasks)
    return Comparison(
        num_tasks=len(tasks),
        before=mean_before,
        after=mean_after,
        difference=math.fsum(differences) / len(tasks),
        interval=compute_clustered_interval([[d] for d in differences]),
        num_improved=sum(d > 0 for d in differences),
        num_worse=sum(d < 0 for d in differences),
    )


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.reward is not None and not math.isnan(trajectory.reward)


def _is_cut_short(trajectory: Trajectory) -> bool:
    return bool(trajectory.interactions) and trajectory.interactions[-1].finish_reason == "length"


def _measure(values: Sequence[float]) -> Lengths | None:
    if not values:
        return None
    ordered = sorted(values)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Lengths(
        mean=math.fsum(ordered) / len(ordered), median=float(median), largest=float(ordered[-1])
    )
