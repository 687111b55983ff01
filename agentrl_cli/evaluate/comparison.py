"""Two evaluations of the same tasks against each other: paired differences and what changed."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl_cli.evaluate.eval_report import Interval, has_passed
from agentrl_cli.log import format_count
from agentrl_cli.records import Trajectory

NUM_RESAMPLES = 10_000
#: Numbers that are drawn at once: 8 MB of them.
_MAX_DRAWN = 1_000_000
#: With fewer tasks that differ, not even a change of all in one direction has odds below 5 % if
#: nothing but chance is behind it: 2 x 0.5^5 = 6 %.
_MIN_DIFFERENT = 6
#: Means of the same rewards in another order differ by rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What the attempts of one evaluation at one task came to."""

    task_id: str
    question: str
    reward: float | None
    """The mean over the scored attempts; None: there are none."""
    has_passed: bool
    """More than half of the scored attempts passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A task that passed in one of two evaluations."""

    task_id: str
    question: str
    reward_before: float
    reward_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedComparison:
    """The change from one evaluation to another, over the tasks that have a reward in both."""

    num_tasks: int
    num_unpaired: int
    """Tasks of either that the other has not attempted, or that have no reward in one."""
    before: float | None
    """Mean over the tasks of the reward before; None: no task."""
    difference: float | None
    """Mean over the tasks of the reward after minus the reward before; None: no task."""
    interval: Interval | None
    """95 %, of :func:`compute_paired_interval`."""
    num_improved: int
    num_worse: int
    newly_passed: tuple[Flip, ...]
    newly_failed: tuple[Flip, ...]

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``the same`` on every task, or ``unclear``."""
        num_different = self.num_improved + self.num_worse
        if self.num_tasks and not num_different:
            return "the same"
        if self.interval is None or num_different < _MIN_DIFFERENT:
            return "unclear"
        low, high = self.interval
        return "better" if low > 0.0 else "worse" if high < 0.0 else "unclear"

    def format_verdict(self, before: str, after: str) -> str:
        """One sentence about the two, such as ``B is better than A by 0.120 (0.050 to 0.190)``."""
        tasks = format_count(self.num_tasks, "task")
        if self.difference is None:
            return f"{after} and {before} have no task in common that both have a reward for"
        if self.verdict == "the same":
            return f"{after} has the rewards of {before} on every task, {tasks}"
        low, high = self.interval or (math.nan, math.nan)
        counts = f"{tasks}: {self.num_improved} improved, {self.num_worse} got worse"
        if self.verdict == "better":
            by = f"{self.difference:.3f} ({low:.3f} to {high:.3f})"
            return f"{after} is better than {before} by {by}, {counts}"
        if self.verdict == "worse":
            by = f"{-self.difference:.3f} ({-high:.3f} to {-low:.3f})"
            return f"{after} is worse than {before} by {by}, {counts}"
        within = "" if self.interval is None else f" ({low:+.3f} to {high:+.3f})"
        change = f"{self.difference:+.3f}{within}"
        return f"{after} is not clearly different from {before}: {change}, {counts}"


def measure_tasks(trajectories: Iterable[Trajectory]) -> dict[str, TaskResult]:
    """What the attempts at each task came to, by a key that equal tasks of other evaluations have.

    The key holds the row: in another dataset, another task has the same position.
    """
    attempts: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        row = json.dumps(trajectory.task, sort_keys=True, default=str)
        digest = hashlib.sha256(row.encode("utf-8", "surrogatepass")).hexdigest()
        attempts.setdefault(f"{trajectory.task_id} {digest}", []).append(trajectory)
    return {key: _measure_task(of_task) for key, of_task in attempts.items()}


def _measure_task(attempts: Sequence[Trajectory]) -> TaskResult:
    rewards = [t.known_reward for t in attempts if t.known_reward is not None]
    return TaskResult(
        task_id=attempts[0].task_id,
        question=attempts[0].question,
        reward=statistics.fmean(rewards) if rewards else None,
        has_passed=2 * sum(map(has_passed, rewards)) > len(rewards),
    )


def compare_tasks(
    before: Mapping[str, TaskResult], after: Mapping[str, TaskResult]
) -> PairedComparison:
    """The change from ``before`` to ``after``, paired by task."""
    rewards: list[float] = []
    differences: list[float] = []
    newly_passed: list[Flip] = []
    newly_failed: list[Flip] = []
    # In an order of their own, so that equal evaluations give equal intervals.
    for key in sorted(before.keys() & after.keys()):
        old, new = before[key], after[key]
        if old.reward is None or new.reward is None:
            continue
        rewards.append(old.reward)
        differences.append(new.reward - old.reward)
        if old.has_passed != new.has_passed:
            flip = Flip(
                task_id=old.task_id,
                question=old.question,
                reward_before=old.reward,
                reward_after=new.reward,
            )
            (newly_passed if new.has_passed else newly_failed).append(flip)
    return PairedComparison(
        num_tasks=len(differences),
        num_unpaired=len(before.keys() | after.keys()) - len(differences),
        before=statistics.fmean(rewards) if rewards else None,
        difference=statistics.fmean(differences) if differences else None,
        interval=compute_paired_interval(differences),
        num_improved=sum(d > _ROUNDING for d in differences),
        num_worse=sum(d < -_ROUNDING for d in differences),
        newly_passed=_in_order(newly_passed),
        newly_failed=_in_order(newly_failed),
    )


def _in_order(flips: Sequence[Flip]) -> tuple[Flip, ...]:
    # Positions in the dataset, as text.
    return tuple(sorted(flips, key=lambda flip: (len(flip.task_id), flip.task_id)))


def compute_paired_interval(differences: Sequence[float], *, seed: int = 0) -> Interval | None:
    """The 95 % percentile bootstrap interval of the mean of ``differences``, one for each task.

    Tasks are drawn with replacement, as many as there are; the interval holds the middle 95 % of
    the means (Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13). What
    makes tasks differ from each other cancels in the differences; the attempts at one task, which
    are not independent, are drawn together. None with fewer than two tasks.
    """
    num_tasks = len(differences)
    if num_tasks < 2:
        return None
    values = np.asarray(differences, dtype=np.float64)
    generator = np.random.default_rng(seed)
    num_at_once = max(1, _MAX_DRAWN // num_tasks)
    means = [
        values[generator.integers(num_tasks, size=(min(num_at_once, left), num_tasks))].mean(axis=1)
        for left in range(NUM_RESAMPLES, 0, -num_at_once)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return float(low), float(high)
