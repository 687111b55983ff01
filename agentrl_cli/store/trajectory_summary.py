"""What lists show: a trajectory without its tokens and messages, and a file's trajectories in
numbers."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from agentrl_cli.prefix_mismatches import MismatchSummary, summarize_prefix_mismatches
from agentrl_cli.records import Boundary, FailureCause, StopReason, Trajectory

#: What of a run's order of tasks is open after a step, by round of the order: the groups of the
#: round that steps were made of (rollout/step_planner.py). Of earlier rounds that are not in it
#: all were, of later ones none.
OpenRounds = Mapping[int, Sequence[str]]


def parse_open_rounds(data: Mapping[str, Sequence[str]]) -> OpenRounds:
    """Open rounds that were written as JSON, where every key is text."""
    return {int(number): names for number, names in data.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What a list shows of a trajectory: everything but its tokens and messages."""

    id: str
    group_id: str
    task_id: str
    sample_index: int
    step: int
    replaced_by: str | None
    """The group that took its group's place."""
    agent_name: str | None
    reward: float | None
    score: float | None
    """What groups are compared by; None: unscored."""
    question: str
    expected: str
    final_answer: str | None
    stop_reason: StopReason | None
    is_cut_short: bool
    failure_boundary: Boundary | None
    failure_cause: FailureCause | None
    failure_kind: str | None
    failure_message: str | None
    seconds: float
    num_turns: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_tool_calls: int
    num_malformed_calls: int
    prefix_mismatches: MismatchSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTotals:
    """The trajectories of a step or an evaluation in numbers; a mean of nothing is None."""

    num_trajectories: int
    reward_mean: float | None
    num_unscored: int
    num_policy_failures: int
    num_surroundings_failures: int
    num_filtered_groups: int
    """Groups that others took the place of."""
    turns_mean: float | None
    tokens_mean: float | None
    prefix_mismatches: MismatchSummary = field(default_factory=MismatchSummary)

    @classmethod
    def of(cls, trajectories: Collection[Trajectory]) -> Self:
        """The totals of ``trajectories``."""
        rewards = [t.known_reward for t in trajectories if t.known_reward is not None]
        num_failed = sum(t.failure is not None for t in trajectories)
        num_policy_failures = sum(t.is_policy_failure for t in trajectories)
        return cls(
            num_trajectories=len(trajectories),
            reward_mean=_mean(rewards),
            num_unscored=len(trajectories) - len(rewards),
            num_policy_failures=num_policy_failures,
            num_surroundings_failures=num_failed - num_policy_failures,
            num_filtered_groups=len({t.group_id for t in trajectories if t.replaced_by}),
            turns_mean=_mean([t.num_turns for t in trajectories]),
            tokens_mean=_mean([t.num_completion_tokens for t in trajectories]),
            prefix_mismatches=summarize_prefix_mismatches(trajectories),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The totals that ``to_dict`` wrote.

        Raises:
            KeyError, TypeError, ValueError: ``data`` is no such totals.
        """
        mismatches = MismatchSummary.from_dict(data["prefix_mismatches"])
        return cls(**{**data, "prefix_mismatches": mismatches})


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
