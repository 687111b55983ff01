"""The metrics of a batch, counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from agentrl_cli.records import (
    Boundary,
    Failure,
    Interaction,
    InteractionStatus,
    MismatchCause,
    Trajectory,
)
from agentrl_cli.train.monitor.batch_metrics import describe_hardness, summarize_trajectories


def call(name: str, num_tokens: int, **fields: Any) -> Interaction:
    return Interaction(id=name, completion_ids=(1,) * num_tokens, **fields)


def attempt(name: str, group: str, reward: float | None, *calls: Interaction, **fields: Any):
    return Trajectory(
        id=name, group_id=group, task_id=group, reward=reward, interactions=calls, **fields
    )


BATCH = [
    attempt(
        "a", "x", 1.0,
        call("a0", 4, reply={"role": "assistant", "tool_calls": [{}, {}]}),
        call("a1", 6, finish_reason="length", mismatch_cause=MismatchCause.HISTORY_EDITED),
    ),
    attempt("b", "x", 0.0, call("b0", 2)),
    attempt(
        "c", "y", None, call("c0", 0, status=InteractionStatus.FAILED),
        failure=Failure(boundary=Boundary.TOOL, kind="ZeroDivisionError", message=""),
    ),
    attempt("d", "y", 0.5, call("d0", 4)),
]  # fmt: skip


def test_parts_of_rewards_are_averaged_over_who_has_them():
    batch = [
        attempt("a", "x", 1.0, call("a0", 1), reward_parts={"form": 1.0, "right": 0.0}),
        attempt("b", "x", 0.0, call("b0", 1), reward_parts={"form": 0.5}),
        attempt("c", "x", None),
    ]
    metrics = summarize_trajectories(batch)
    parts = {k: v for k, v in metrics.items() if k.startswith("reward_part_")}
    assert parts == {"reward_part_form": 0.75, "reward_part_right": 0.0}


def test_a_batch_by_hand():
    metrics = summarize_trajectories(BATCH)
    assert metrics["num_trajectories"] == 4
    assert metrics["num_unscored"] == 1
    # Rewards 1, 0, 1/2: mean 1/2, unbiased deviation sqrt((1/4 + 1/4 + 0) / 2) = 1/2.
    assert metrics["reward_mean"] == 0.5
    assert metrics["reward_std"] == pytest.approx(0.5)
    # Group y has one scored trajectory only.
    assert metrics["num_groups_without_signal"] == 1
    # Completed calls 2 + 1 + 0 + 1; tool calls 2; tokens 10, 2, 0, 4.
    assert metrics["turns_mean"] == 1.0
    assert metrics["tool_calls_mean"] == 0.5
    assert metrics["completion_tokens_mean"] == 4.0
    assert metrics["completion_tokens_max"] == 10.0
    assert metrics["truncated_fraction"] == 0.25
    assert metrics["failures"] == 1
    assert metrics["failures_tool"] == 1
    assert sum(metrics[f"failures_{boundary}"] for boundary in Boundary) == 1
    assert metrics["prefix_mismatches_history_edited"] == 1
    assert sum(metrics[f"prefix_mismatches_{cause}"] for cause in MismatchCause) == 1
    # It is the only turn that goes back to another.
    assert metrics["prefix_mismatch_fraction"] == 1.0
    assert all(metrics[f"reprefilled_tokens_{cause}"] == 0 for cause in MismatchCause)
    assert all(metrics[f"dropped_tokens_{cause}"] == 0 for cause in MismatchCause)


def test_replaced_groups_count_in_everything_that_is_reported():
    """Only what was trained on would show a reward that nobody ever got."""
    batch = [
        attempt("a", "x", 1.0, call("a0", 4), replaced_by="z"),
        attempt("b", "x", 1.0, call("b0", 4), replaced_by="z"),
        attempt("c", "y", 1.0, call("c0", 4)),
        attempt("d", "y", 0.0, call("d0", 4)),
        attempt("e", "z", 0.0, call("e0", 12)),
        attempt("f", "z", 0.0, call("f0", 8)),
    ]
    metrics = summarize_trajectories(batch)
    assert metrics["num_filtered_groups"] == 1
    assert metrics["num_groups_without_signal"] == 2
    assert metrics["num_trajectories"] == 6
    assert metrics["reward_mean"] == 0.5
    assert metrics["completion_tokens_mean"] == 6.0
    assert summarize_trajectories(BATCH)["num_filtered_groups"] == 0


@pytest.mark.parametrize("reward", [None, math.nan])
def test_without_a_reward_there_is_no_mean_to_misread(reward: float | None):
    metrics = summarize_trajectories([attempt("a", "x", reward, call("a0", 1))])
    assert "reward_mean" not in metrics
    assert metrics["num_unscored"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_what_is_unscored_for_a_turn_of_its_own_counts_in_no_mean():
    batch = [
        attempt("a", "x", 1.0, call("a0", 1, turn_return=math.nan)),
        attempt("b", "x", 0.25, call("b0", 1, turn_return=0.25)),
    ]
    metrics = summarize_trajectories(batch)
    assert metrics["num_unscored"] == 1
    assert metrics["reward_mean"] == metrics["reward_max"] == 0.25


def test_slow_trajectories_that_are_not_trained_on_are_seen():
    def ratio(*batch: Trajectory) -> float | None:
        return summarize_trajectories(batch).get("trained_seconds_ratio")

    quick = attempt("a", "x", 1.0, call("a0", 1), seconds=1.0)
    slow = attempt("b", "x", 0.0, call("b0", 1), seconds=8.0)
    failed, replaced = replace(slow, reward=None), replace(slow, replaced_by="z")
    metrics = summarize_trajectories([quick, slow])
    assert (metrics["trajectory_seconds_mean"], metrics["trajectory_seconds_max"]) == (4.5, 8.0)
    assert metrics["trained_seconds_ratio"] == 1.0
    # Trained 1 s; all (1 + 8) / 2. Trained (1 + 8) / 2; all (1 + 8 + 8 + 8) / 4 = 6.25.
    assert ratio(quick, failed) == ratio(quick, replaced) == pytest.approx(1 / 4.5)
    assert ratio(quick, slow, failed, replaced) == pytest.approx(4.5 / 6.25)
    assert ratio(slow, replace(quick, reward=None)) == pytest.approx(8 / 4.5)
    # Nothing trained; nothing measured.
    assert ratio() is ratio(failed) is ratio(replace(quick, seconds=0.0)) is None


def test_an_empty_batch_and_a_single_reward_are_finite():
    assert all(math.isfinite(v) for v in summarize_trajectories([]).values())
    assert summarize_trajectories([attempt("a", "x", 0.3, call("a0", 1))])["reward_std"] == 0.0


def test_a_base_that_solves_nearly_nothing_or_all_is_told_what_to_do() -> None:
    def describe(
        mean: float, low: float = 0.0, high: float = 1.0, num_alike: int = 6
    ) -> str | None:
        counts = {"num_groups": 8.0, "num_groups_without_signal": float(num_alike)}
        rewards = {"reward_mean": mean, "reward_min": low, "reward_max": high}
        return describe_hardness(rewards | counts)

    assert "easier tasks or a stronger model" in (describe(0.04) or "")
    assert "harder tasks" in (describe(0.96) or "")
    assert describe(0.05) is describe(0.5) is describe(0.95) is describe_hardness({}) is None
    assert describe(0.0, low=-1.0) is None, "its scale is not that of solved tasks"
    assert describe(0.02, num_alike=5) is None, "small rewards that differ teach"


def test_the_seconds_of_trajectories_are_model_calls_tools_and_rewards():
    timed = [
        attempt(
            "a", "x", 1.0,
            call("a0", 1, started_at=100.0, seconds=2.0),
            # At the same time as the one before it, and a second longer.
            call("a1", 1, started_at=101.0, seconds=2.0),
            call("a2", 1, started_at=105.0, seconds=1.0),
            seconds=9.0, reward_seconds=0.5,
        ),
        # Another clock has measured more than there was.
        attempt("b", "x", 0.0, call("b0", 1, started_at=7.0, seconds=1.01), seconds=1.0),
        attempt("c", "y", None),
    ]  # fmt: skip
    metrics = summarize_trajectories(timed)
    assert metrics["model_seconds"] == pytest.approx(4.0 + 1.0)
    assert metrics["reward_seconds"] == 0.5
    assert metrics["agent_seconds"] == pytest.approx(4.5)
