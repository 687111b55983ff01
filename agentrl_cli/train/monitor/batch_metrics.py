"""A batch of trajectories: its progress while it is sampled, and its metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from agentrl_cli.prefix_mismatches import MismatchTotals, summarize_prefix_mismatches
from agentrl_cli.records import Boundary, FailureCause, MismatchCause, StopReason, Trajectory
from agentrl_cli.scores import PART, compute_group_statistics, compute_part_means, compute_score

#: Mean rewards below and above which a task counts as too hard or too easy, where also most groups
#: score alike: small rewards that differ teach well.
_HARD, _EASY = 0.05, 0.95
_MOST = 0.75


def summarize_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The step's metrics of its trajectories; every value is finite.

    ``trajectories`` are all that were sampled for the step, including those of replaced groups:
    what is not trained on is reported all the same. ``reward_*`` (``reward_std`` unbiased) are
    over the scored trajectories and missing when there are none, as 0 would be read as a reward;
    ``reward_part_<name>`` over those with that part.
    ``truncated_fraction`` is the share of trajectories with a reply cut by its length limit.
    Lengths, turns, tool calls and seconds are per trajectory; ``trained_seconds_ratio`` is the mean
    duration of those that are trained on / that of all, so below 1 where slow ones lose their
    share, and missing where none is trained on.
    ``model_seconds``, ``agent_seconds`` (tools and the agent's code) and ``reward_seconds`` are
    summed over the trajectories, and add up to their seconds. What counts as a prefix mismatch, and
    what it costs, is defined in :mod:`agentrl_cli.prefix_mismatches`.
    """
    return {
        **_summarize_rewards(trajectories),
        **_summarize_sizes(trajectories),
        **_summarize_seconds(trajectories),
        **_count_ends(trajectories),
        **_count_prefix_mismatches(trajectories),
    }


def describe_hardness(metrics: Mapping[str, float]) -> str | None:
    """What to do where the model solves nearly none or nearly all of its first tasks, and most
    groups score alike; None: they do not, or its rewards are not from 0 to 1."""
    mean = metrics.get("reward_mean")
    if mean is None or metrics["reward_min"] < 0.0 or metrics["reward_max"] > 1.0:
        return None
    num_groups, num_alike = metrics["num_groups"], metrics["num_groups_without_signal"]
    if num_alike < _MOST * num_groups:
        return None
    seen = (
        f"the model begins with a mean reward of {mean:.3f}, and {num_alike:.0f} of "
        f"{num_groups:.0f} groups"
    )
    if mean < _HARD:
        return (
            f"{seen} fail alike and teach nothing. Look at what it does "
            "(agentrl inspect-trajectories RUN --step 1: is the answer there, and read as one?). "
            "Then choose the tasks that it solves sometimes (agentrl eval --save-tasks "
            "FILE.jsonl); or train it on its own best trajectories first (agentrl "
            "export-trajectories RUN --min-reward 1 --to FILE, agentrl sft) or on examples; or "
            "take easier tasks or a stronger model, give rewards for parts of a solution, or raise "
            "gconfig.n_samples"
        )
    if mean > _EASY:
        return (
            f"{seen} succeed alike and leave nothing to learn. Look whether the reward means what "
            "it should (agentrl inspect-trajectories RUN --step 1); then take harder tasks, or "
            "type rollout.filter.kind=dynamic_sampling to skip solved ones"
        )
    return None


def _summarize_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards = [
        t.reward for t in trajectories if t.reward is not None and compute_score(t) is not None
    ]
    groups = compute_group_statistics(trajectories).values()
    replaced = {t.group_id for t in trajectories if t.replaced_by is not None}
    summary = {
        "num_groups": float(len(groups)),
        "num_trajectories": float(len(trajectories)),
        "num_unscored": float(len(trajectories) - len(rewards)),
        "num_groups_without_signal": float(sum(not group.has_signal for group in groups)),
        "num_filtered_groups": float(len(replaced)),
    }
    if rewards:
        summary["reward_mean"] = statistics.fmean(rewards)
        summary["reward_min"] = min(rewards)
        summary["reward_max"] = max(rewards)
        summary["reward_std"] = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    parts = compute_part_means(trajectories)
    return summary | {f"{PART}{name}": value for name, value in parts.items()}


def _summarize_sizes(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    tokens = [t.num_completion_tokens for t in trajectories]
    num_truncated = sum(
        any(i.finish_reason == "length" for i in t.interactions) for t in trajectories
    )
    return {
        "turns_mean": _mean([t.num_turns for t in trajectories]),
        "tool_calls_mean": _mean([t.num_tool_calls for t in trajectories]),
        "completion_tokens_mean": _mean(tokens),
        "completion_tokens_max": float(max(tokens, default=0)),
        "truncated_fraction": num_truncated / max(len(trajectories), 1),
    }


def _summarize_seconds(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    seconds = [t.seconds for t in trajectories]
    trained = [
        t.seconds for t in trajectories if t.replaced_by is None and compute_score(t) is not None
    ]
    reward_seconds = [t.reward_seconds for t in trajectories]
    model_seconds = [_count_model_seconds(t) for t in trajectories]
    summary = {
        "trajectory_seconds_mean": _mean(seconds),
        "trajectory_seconds_max": max(seconds, default=0.0),
        "model_seconds": sum(model_seconds),
        "reward_seconds": sum(reward_seconds),
        "agent_seconds": max(0.0, sum(seconds) - sum(model_seconds) - sum(reward_seconds)),
    }
    if trained and any(seconds):
        summary["trained_seconds_ratio"] = _mean(trained) / _mean(seconds)
    return summary


def _count_model_seconds(trajectory: Trajectory) -> float:
    """How long at least one of its model calls was in progress."""
    total, until = 0.0, 0.0
    for call in sorted(trajectory.interactions, key=lambda i: i.started_at):
        ended_at = call.started_at + call.seconds
        total += max(0.0, ended_at - max(call.started_at, until))
        until = max(until, ended_at)
    # What another clock measured can be longer by a trifle.
    return min(total, max(0.0, trajectory.seconds - trajectory.reward_seconds))


def _count_ends(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    failed = [t.failure for t in trajectories if t.failure is not None]
    boundaries, causes = Counter(f.boundary for f in failed), Counter(f.cause for f in failed)
    stops = Counter(t.stop_reason for t in trajectories)
    return {
        "failures": float(len(failed)),
        **{f"{cause}_failures": float(causes[cause]) for cause in FailureCause},
        **{f"failures_{boundary}": float(boundaries[boundary]) for boundary in Boundary},
        **{f"stops_{reason}": float(stops[reason]) for reason in StopReason},
    }


def _count_prefix_mismatches(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    summary = summarize_prefix_mismatches(trajectories)
    counts = {"prefix_mismatch_fraction": summary.mismatch_fraction}
    for cause in MismatchCause:
        totals = summary.by_cause.get(cause, MismatchTotals())
        counts[f"prefix_mismatches_{cause}"] = float(totals.num_turns)
        counts[f"reprefilled_tokens_{cause}"] = float(totals.num_reprefilled_tokens)
        counts[f"dropped_tokens_{cause}"] = float(totals.num_dropped_tokens)
    return counts


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0
