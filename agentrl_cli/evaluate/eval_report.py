"""What trajectories amount to: a report, and its statistics; all pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from pydantic import TypeAdapter

from agentrl_cli.prefix_mismatches import MismatchSummary, summarize_prefix_mismatches
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import PART, compute_part_means

Interval = tuple[float, float]

#: Rewards that fall short of the threshold by rounding alone do pass.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean, median and largest of a count over the trajectories."""

    mean: float
    median: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """What an evaluation found. ``to_dict`` and ``from_dict`` are each other's inverse."""

    num_tasks: int
    num_trajectories: int
    num_unscored: int
    """Trajectories without a reward (or with NaN): out of the mean and of pass@k alike."""
    mean_reward: float | None
    """Over scored trajectories; None: nothing was scored."""
    interval: Interval | None
    """95 %, clustered by task; None: fewer than two scored tasks."""
    lowest_reward: float | None
    reward_parts: Mapping[str, float]
    """Mean of every part that the reward function names."""
    pass_threshold: float
    pass_at_k: Mapping[int, float]
    num_always_passed: int
    """Tasks of which all scored trajectories passed."""
    num_sometimes_passed: int
    completion_tokens: Lengths | None
    turns: Lengths | None
    tool_calls: Lengths | None
    seconds: Lengths | None
    num_cut_short: int
    """Trajectories whose last reply was stopped by its token limit."""
    failures: Mapping[str, int]
    """Boundary to number of trajectories, most frequent first."""
    num_policy_failures: int
    num_surroundings_failures: int
    prefix_mismatches: MismatchSummary
    """Turns whose tokens could not continue an earlier turn, and what that cost."""
    task_rewards: Mapping[str, float]
    """Task id to its mean reward."""

    def list_metrics(self) -> dict[str, float]:
        """What loggers get of it, beside the metrics of the step."""
        metrics = {f"eval_pass_at_{k}": value for k, value in self.pass_at_k.items()}
        metrics |= {f"eval_{PART}{name}": value for name, value in self.reward_parts.items()}
        if self.mean_reward is not None:
            metrics["eval_mean_reward"] = self.mean_reward
        for name in ("turns", "tool_calls", "completion_tokens"):
            lengths: Lengths | None = getattr(self, name)
            if lengths is not None:
                metrics[f"eval_{name}_mean"] = lengths.mean
        for name in ("unscored", "cut_short", "policy_failures", "surroundings_failures"):
            metrics[f"eval_{name}"] = float(getattr(self, f"num_{name}"))
        return metrics

    def to_dict(self) -> dict[str, Any]:
        """Plain data for a JSON file."""
        data: dict[str, Any] = TypeAdapter(EvalReport).dump_python(self, mode="json")
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EvalReport:
        """The report that ``to_dict`` wrote.

        Raises:
            ValueError: ``data`` is not such a report.
        """
        return TypeAdapter(EvalReport).validate_python(data)


def build_report(
    trajectories: Sequence[Trajectory],
    *,
    k_values: Sequence[int] = (1,),
    pass_threshold: float = 1.0,
) -> EvalReport:
    """The report of an evaluation; ``k_values`` above the trajectories per task are left out."""
    rewards: dict[str, list[float]] = {}
    outcomes: dict[str, list[bool]] = {}
    for t in trajectories:
        known = [] if t.known_reward is None else [t.known_reward]
        rewards.setdefault(t.task_id, []).extend(known)
        passed = [has_passed(r, pass_threshold) for r in known]
        outcomes.setdefault(t.task_id, []).extend(passed)
    scored = [reward for of_task in rewards.values() for reward in of_task]
    at_k = {k: compute_pass_at_k(outcomes, k) for k in sorted(set(k_values))}
    failures = Counter(t.failure.boundary.value for t in trajectories if t.failure is not None)
    num_policy_failures = sum(t.is_policy_failure for t in trajectories)
    return EvalReport(
        num_tasks=len(outcomes),
        num_trajectories=len(trajectories),
        num_unscored=len(trajectories) - len(scored),
        mean_reward=statistics.fmean(scored) if scored else None,
        interval=compute_reward_interval(list(rewards.values())),
        lowest_reward=min(scored, default=None),
        reward_parts=compute_part_means(trajectories),
        pass_threshold=pass_threshold,
        pass_at_k={k: value for k, value in at_k.items() if value is not None},
        num_always_passed=sum(bool(of_task) and all(of_task) for of_task in outcomes.values()),
        num_sometimes_passed=sum(any(of_task) > all(of_task) for of_task in outcomes.values()),
        completion_tokens=_measure([t.num_completion_tokens for t in trajectories]),
        turns=_measure([t.num_turns for t in trajectories]),
        tool_calls=_measure([t.num_tool_calls for t in trajectories]),
        seconds=_measure([t.seconds for t in trajectories]),
        num_cut_short=sum(t.is_cut_short for t in trajectories),
        failures=dict(failures.most_common()),
        num_policy_failures=num_policy_failures,
        num_surroundings_failures=failures.total() - num_policy_failures,
        prefix_mismatches=summarize_prefix_mismatches(trajectories),
        task_rewards={task: statistics.fmean(r) for task, r in rewards.items() if r},
    )


def has_passed(reward: float, threshold: float = 1.0) -> bool:
    """Whether a reward is that of a solved task."""
    return reward >= threshold - _ROUNDING


def _measure(values: Sequence[float]) -> Lengths | None:
    if not values:
        return None
    return Lengths(
        mean=statistics.fmean(values),
        median=float(statistics.median(values)),
        largest=float(max(values)),
    )


def compute_reward_interval(clusters: Sequence[Sequence[float]]) -> Interval | None:
    """The 95 % interval of a mean reward; for rewards from 0 to 1, inside of that range.

    There it is Wilson's (1927) at the effective number of values, as of a proportion in a survey
    of clusters (Korn and Graubard 1998, "Confidence Intervals for Proportions with Small Expected
    Number of Positive Counts", with Wilson's interval): with the mean p and the variance of
    :func:`compute_clustered_interval`, n = p (1 - p) / variance. Where all are 0, or all 1, n is
    the number of clusters: that all passed is no proof that all would.
    """
    filled = [values for values in clusters if values]
    moments = _measure_clusters(filled)
    if moments is None or not all(0.0 <= v <= 1.0 for values in filled for v in values):
        return compute_clustered_interval(filled)
    mean, variance = moments
    if variance == 0.0 and 0.0 < mean < 1.0:
        return mean, mean
    quantile = compute_t_quantile(0.975, len(filled) - 1)
    weight = quantile**2 / (mean * (1 - mean) / variance if variance else len(filled))
    spread = quantile * math.sqrt(variance + weight**2 / (4 * quantile**2))
    center = mean + weight / 2
    return max(0.0, (center - spread) / (1 + weight)), min(1.0, (center + spread) / (1 + weight))


def compute_clustered_interval(clusters: Sequence[Sequence[float]]) -> Interval | None:
    """The 95 % interval of the mean over all values, which are correlated within a cluster.

    Trajectories of the same task are not independent observations: with tasks as clusters t
    of values y_ti, N values in G clusters and the mean m over all values,

        variance = G / (G - 1) x sum over t of (sum over i of (y_ti - m))^2 / N^2
        interval = m +- t(0.975, G - 1) x sqrt(variance)

    the cluster-robust variance of a mean with the usual correction for few clusters
    (Cameron and Miller 2015, "A Practitioner's Guide to Cluster-Robust Inference",
    section II.C). With one value a cluster it is the ordinary t interval. None with
    fewer than two clusters, which say nothing about the spread.
    """
    filled = [values for values in clusters if values]
    moments = _measure_clusters(filled)
    if moments is None:
        return None
    mean, variance = moments
    margin = compute_t_quantile(0.975, len(filled) - 1) * math.sqrt(variance)
    return mean - margin, mean + margin


def _measure_clusters(filled: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """The mean over all values and its variance; None with fewer than two clusters."""
    num_clusters = len(filled)
    if num_clusters < 2:
        return None
    num_values = sum(len(values) for values in filled)
    mean = math.fsum(v for values in filled for v in values) / num_values
    squares = math.fsum(math.fsum(v - mean for v in values) ** 2 for values in filled)
    return mean, num_clusters / (num_clusters - 1) * squares / num_values**2


def compute_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t distribution, for probabilities above one half.

    Exact for 1 and 2 degrees of freedom; beyond, the expansion of Abramowitz and Stegun,
    "Handbook of Mathematical Functions", 26.7.5 (off by 0.2 % at 3 degrees for 0.975, less
    above).
    """
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def compute_pass_at_k(outcomes: Mapping[str, Sequence[bool]], k: int) -> float | None:
    """The chance that at least one of ``k`` trajectories of a task passes, averaged over tasks.

    Unbiased for each task with n >= k trajectories, c of them passed: 1 - C(n-c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374, equation 1). Tasks with fewer are left out;
    None when that leaves none.
    """
    values = []
    for passed in outcomes.values():
        num_samples, num_failed = len(passed), len(passed) - sum(passed)
        if num_samples >= k:
            values.append(1.0 - math.comb(num_failed, k) / math.comb(num_samples, k))
    return statistics.fmean(values) if values else None
