from __future__ import annotations

import json
import math
from typing import Any

import pytest

from agentrl_cli.evaluate.eval_report import EvalReport, build_report
from agentrl_cli.records import Boundary, Failure, Interaction, MismatchCause, Trajectory


def attempt(task: int, index: int, reward: float | None, **fields: Any) -> Trajectory:
    return Trajectory(
        id=f"{task}/{index}",
        group_id=str(task),
        task_id=str(task),
        sample_index=index,
        reward=reward,
        **fields,
    )


def call(num_tokens: int, **fields: Any) -> Interaction:
    return Interaction(id="c", completion_ids=(1,) * num_tokens, **fields)


def test_report_of_a_small_evaluation_by_hand() -> None:
    failure = Failure(boundary=Boundary.TIMEOUT, kind="TimeoutError", message="")
    tool_call = {"role": "assistant", "tool_calls": [{"id": "1"}]}
    report = build_report(
        [
            attempt(0, 0, 1.0, interactions=(call(3, reply=tool_call), call(5)), seconds=2.0),
            attempt(0, 1, 0.0, interactions=(call(10, finish_reason="length"),), seconds=4.0),
            attempt(1, 0, 1.0, interactions=(call(2),), reward_parts={"form": 0.5}),
            attempt(1, 1, None, failure=failure),
        ],
        k_values=(1, 2, 4),
    )
    assert report.num_tasks == 2
    assert report.num_trajectories == 4
    assert report.num_unscored == 1
    assert report.mean_reward == pytest.approx(2 / 3)
    assert report.interval is not None
    # Over the scored ones, as the mean. pass@1: task 0 one of two, task 1 one of one.
    assert report.pass_at_k == {1: 0.75, 2: 1.0}
    assert (report.failures, report.num_surroundings_failures) == ({"timeout": 1}, 1)
    assert report.num_cut_short == 1
    assert report.completion_tokens is not None
    # 8, 10, 2 and 0 tokens
    assert report.completion_tokens.mean == 5.0
    assert report.completion_tokens.median == 5.0
    assert report.completion_tokens.largest == 10.0
    assert report.turns is not None
    assert report.turns.mean == 1.0
    assert report.tool_calls is not None
    assert report.tool_calls.mean == 0.25
    assert report.task_rewards == {"0": 0.5, "1": 1.0}
    assert report.list_metrics() == pytest.approx(
        {
            "eval_mean_reward": 2 / 3,
            "eval_reward_part_form": 0.5,
            "eval_pass_at_1": 0.75,
            "eval_pass_at_2": 1.0,
            "eval_turns_mean": 1.0,
            "eval_tool_calls_mean": 0.25,
            "eval_completion_tokens_mean": 5.0,
            "eval_unscored": 1,
            "eval_cut_short": 1,
            "eval_policy_failures": 0,
            "eval_surroundings_failures": 1,
        }
    )


def test_report_survives_json() -> None:
    report = build_report([attempt(t, 0, 0.1 * t) for t in range(5)], k_values=(1,))
    assert EvalReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_report_counts_prefix_mismatches_and_survives_json_with_them() -> None:
    broken = call(
        1, prompt_ids=(1, 2), parent_id="c0", mismatch_cause=MismatchCause.HISTORY_EDITED, started=3
    )
    first = Interaction(id="c0", prompt_ids=(1,), completion_ids=(5, 6), started=1, ended=2)
    report = build_report([attempt(0, 0, 1.0, interactions=(first, broken))])
    assert report.prefix_mismatches.num_replaying_turns == 1
    assert report.prefix_mismatches.by_cause[MismatchCause.HISTORY_EDITED].num_turns == 1
    # The parent's sequence is 1 5 6, the request's prompt 1 2.
    assert report.prefix_mismatches.total.num_reprefilled_tokens == 1
    assert report.prefix_mismatches.total.num_dropped_tokens == 2
    assert EvalReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_nothing_to_report_on() -> None:
    report = build_report([])
    assert report.mean_reward is None
    assert report.interval is None
    assert report.turns is None
    assert report.pass_at_k == {}
    assert EvalReport.from_dict(report.to_dict()) == report


def test_nan_is_unscored() -> None:
    report = build_report([attempt(0, 0, math.nan), attempt(1, 0, 1.0)])
    assert report.num_unscored == 1
    assert report.mean_reward == 1.0
    assert report.pass_at_k == {1: 1.0}


def test_a_pass_is_a_reward_at_the_threshold() -> None:
    made = [attempt(0, 0, 0.1 + 0.2), attempt(1, 0, 0.7 + 0.2 + 0.1)]
    assert build_report(made).pass_at_k == {1: 0.5}
    assert build_report(made, pass_threshold=0.3).pass_at_k == {1: 1.0}
