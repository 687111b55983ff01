"""What the page says to look at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.inspector.report.report_data import ReportData
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    MismatchCause,
    Trajectory,
)
from agentrl_cli.store.run_folder import RunFolder


def make(group: str, number: int, task: str = "1", **fields: Any) -> Trajectory:
    call = {"id": "c", "completion_ids": (1, 2), "rollout_logprobs": (-0.1, -0.2)}
    call |= fields.pop("call", {})
    defaults = {"reward": 1.0, "step": 1}
    return Trajectory(
        id=f"{group}/{number}", group_id=group, task_id=task, sample_index=number,
        interactions=(Interaction(**call),), **defaults | fields,
    )  # fmt: skip


def read_head(folder: RunFolder) -> dict[str, Any]:
    return ReportData(folder, has_tokenizer=False).read()[1]


def test_a_quiet_run_has_nothing_to_look_at_but_its_least_likely_tokens(
    run_config: Callable[..., ExperimentConfig],
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.write_trajectories(1, [make("g", 0), make("g", 1)])
        [found] = read_head(folder)["highlights"]
    assert found["kind"] == "logprobs"


def test_the_largest_gaps_between_engine_and_trainer_come_first(
    run_config: Callable[..., ExperimentConfig],
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        rows = [make("g", n, call={"id": f"c{n}"}) for n in range(3)]
        folder.write_trajectories(1, rows)
        computed = {"c1": (-0.1, -0.25), "c2": (-1.6, -0.2)}
        values = {name: np.array(each, np.float32) for name, each in computed.items()}
        folder.write_proximal_logprobs(1, values)
        head = read_head(folder)
    assert head["hasGaps"]
    [found] = [found for found in head["highlights"] if found["kind"] == "gaps"]
    shown = [(item["name"], item["text"]) for item in found["items"]]
    assert shown == [("g/2", "1.5 nats"), ("g/1", "0.05 nats")]


def test_what_needs_attention_is_found_where_it_is(
    run_config: Callable[..., ExperimentConfig],
) -> None:
    lost = Failure(boundary=Boundary.TOOL, kind="OSError", message="no such host")
    unknown = Failure(
        boundary=Boundary.AGENT, kind="ModelBehaviorError", message="no such tool",
        cause=FailureCause.POLICY,
    )  # fmt: skip
    rows = [
        make("a", 0, reward=0.0),
        make("a", 1, call={"has_malformed_call": True}),
        make("b", 0, reward=None, failure=lost),
        make("b", 1, reward=0.0, failure=unknown),
        make("c", 0, call={"finish_reason": "length"}),
        make("c", 1, reward=float("nan")),
        make("d", 0, call={"rollout_logprobs": (-0.1, -9.5)}),
        make("d", 1, call={"parent_id": "x", "mismatch_cause": MismatchCause.HISTORY_EDITED}),
    ]
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.write_trajectories(1, rows)
        folder.append_metrics({"step": 1, "alarm_truncated": 1.0, "alarm_logprob_gap": 0.0})
        for step, rewards in ((1, (1.0, 1.0, 0.0)), (2, (1.0, 0.0, 1.0))):
            tasks = [make(f"e{step}.{n}", 0, str(n), reward=r) for n, r in enumerate(rewards)]
            folder.write_eval(step, tasks, build_report(tasks).to_dict())
        head = read_head(folder)
    found = {h["kind"]: h for h in head["highlights"]}
    # The most urgent first.
    assert [*found] == [
        "alarms", "regressions", "surroundings", "policy", "malformed", "cut", "mismatch",
        "unscored", "spread", "logprobs",
    ]  # fmt: skip
    places = {kind: [item.get("row") for item in h["items"]] for kind, h in found.items()}
    assert found["alarms"]["items"] == [{"text": "truncated: active in steps 1", "step": 1}]
    # The second task of the second evaluation, after eight trajectories and three.
    assert places["regressions"] == [12]
    assert found["regressions"]["link"] == ("#/evaluations?before=eval-000001&after=eval-000002")
    assert places["surroundings"] == [2]
    assert found["surroundings"]["items"][0]["text"] == "tool: OSError: no such host"
    assert (places["policy"], places["malformed"], places["cut"]) == ([3], [1], [4])
    assert (places["mismatch"], places["unscored"]) == ([7], [5])
    # The other groups are too small or score alike.
    [spread] = found["spread"]["items"]
    assert (spread["row"], spread["group"], spread["name"]) == (0, "a", "task 1")
    assert found["cut"]["items"][0]["name"] == "c/0"
    assert places["logprobs"][0] == 6


def test_curves_are_those_that_the_metrics_hold(
    run_config: Callable[..., ExperimentConfig],
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.append_metrics({"step": 1, "reward_mean": 0.25, "entropy": float("nan")})
        folder.append_metrics({"step": 2, "reward_mean": float("inf"), "entropy": float("nan")})
        metrics = read_head(folder)["metrics"]
    assert metrics == {"step": [1.0, 2.0], "reward_mean": [0.25, None]}


def test_an_evaluation_whose_report_says_nothing_is_there_all_the_same(
    folder: RunFolder,
) -> None:
    head = read_head(folder)
    assert [(e["name"], e["mean"], e["interval"]) for e in head["evals"]] == [
        ("eval 0", None, None), ("eval 2 manual", None, None),
    ]  # fmt: skip
