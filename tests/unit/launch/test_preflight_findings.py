"""What trajectories of a trial mean for the training to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RewardError
from agentrl_cli.launch.preflight.check import CheckReport
from agentrl_cli.launch.preflight.findings import Finding, Severity, split_advice
from agentrl_cli.launch.preflight.step_cost import measure_step_cost
from agentrl_cli.launch.preflight.trial import Trial, find_place, spread
from agentrl_cli.launch.preflight.trial_findings import find_in_trial, judge_rewards
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    StopReason,
    Trajectory,
)
from agentrl_cli.rollout.reward_process import Score, build_score


@pytest.fixture
def config() -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "demo",
            "model": {"path": "x/y"},
            "agent_builder_path": "a.py:build",
            "reward_fn_path": "a.py:reward",
            "gconfig": {"n_samples": 8, "max_tokens": 100},
            "train_dataset": {"path": "t.jsonl", "batch_size": 16},
            "rollout": {"max_concurrent": 64, "reward_workers": 4},
        }
    )


def _make(reward: float | None = 1.0, task: int = 0, **more: Any) -> Trajectory:
    call = Interaction(
        id=f"c{task}", prompt_ids=(1,) * 10, completion_ids=(2,) * 5, finish_reason="stop",
        seconds=2.0, reward=reward, turn_return=reward,
    )  # fmt: skip
    given: dict[str, Any] = {"interactions": (call,), "seconds": 3.0, **more}
    return Trajectory(
        id=f"g{task}/0", group_id=f"g{task}", task_id=str(task), reward=reward, **given
    )


def _find(config: ExperimentConfig, trajectories: Sequence[Trajectory], **more: Any) -> list[str]:
    trial = Trial("m", is_stand_in=False, trajectories=[*trajectories], **more)
    return [finding.code for finding in find_in_trial(config, trial)]


@pytest.mark.parametrize(
    ("rewards", "code", "severity", "verdict"),
    [
        ([0.0] * 40 + [1.0], "base_pass_rate", "warning", "nothing to learn from"),
        ([1.0] * 40 + [0.0], "base_pass_rate", "warning", "nothing left to learn"),
        ([1.0] * 38 + [0.0] * 2, "base_pass_rate", "note", "fine"),
        ([0.0] * 38 + [1.0] * 2, "base_pass_rate", "note", "fine"),
        ([0.5] * 8, "reward_constant", "warning", "every reward is 0.5"),
        # Parts of the way: none has passed, and there is much to learn.
        ([0.1, 0.2, 0.3, 0.4], "base_pass_rate", "note", "fine"),
    ],
)
def test_the_verdict_on_the_base_pass_rate(
    rewards: list[float], code: str, severity: str, verdict: str
) -> None:
    trajectories = [_make(reward, task) for task, reward in enumerate(rewards)]
    [finding] = judge_rewards(trajectories, is_stand_in=False)
    assert (finding.code, finding.severity) == (code, severity)
    assert verdict in finding.found
    assert bool(finding.remedy) == (severity == "warning")


def test_a_stand_in_is_not_judged() -> None:
    [finding] = judge_rewards([_make(0.0)] * 8, is_stand_in=True)
    assert finding.severity is Severity.NOTE
    assert "says nothing" in finding.found
    assert judge_rewards([_make(None)], is_stand_in=False) == []


def test_each_boundary_is_one_finding_with_the_users_line(config: ExperimentConfig) -> None:
    raised = Failure(
        boundary=Boundary.TOOL,
        kind="KeyError",
        message="'x'",
        traceback='Traceback\n  File "/me/agent.py", line 7, in search\n    x\nKeyError',
    )
    sampled = replace(raised, boundary=Boundary.AGENT, cause=FailureCause.POLICY)
    trajectories = [_make(None, n, failure=raised) for n in range(3)]
    trajectories.append(_make(0.0, 9, failure=sampled))
    trial = Trial("m", is_stand_in=False, trajectories=trajectories)
    found = {finding.code: finding for finding in find_in_trial(config, trial)}
    tool = found["failure_tool"]
    assert tool.severity is Severity.ERROR
    assert tool.where == "/me/agent.py:7 in search"
    assert "3 of 4" in tool.found
    assert "return its errors as text" in tool.remedy
    assert found["failure_agent"].severity is Severity.NOTE


def test_short_replies_budgets_and_what_took_long(config: ExperimentConfig) -> None:
    good = _make()
    cut = replace(good, interactions=(replace(good.interactions[0], finish_reason="length"),))
    assert "replies_cut" in _find(config, [cut, good])
    assert "replies_cut" not in _find(config, [good] * 4 + [cut])
    assert "budget_reached" in _find(config, [replace(good, stop_reason=StopReason.MAX_TURNS)])
    assert "model_not_called" in _find(config, [replace(good, interactions=())])
    assert "trial_unfinished" in _find(config, [good], is_late=True, num_planned=8)
    assert "reward_slow" in _find(config, [good], scores=[Score(reward=1.0, run_seconds=40.0)])
    assert "event_loop_blocked" in _find(config, [good], stalls={"a.py:1 in f": 0.5})


@pytest.mark.parametrize(
    ("result", "returned"),
    [
        (1.0, "float"),
        (True, "bool"),
        (None, "None"),
        (float("nan"), "NaN"),
        ({"reward": 2, "style": 0.5}, "int"),
    ],
)
def test_what_a_reward_function_returned_is_kept(result: Any, returned: str) -> None:
    assert build_score(result, 0.0).returned == returned


def test_numbers_of_numpy_and_wrong_results() -> None:
    numpy = pytest.importorskip("numpy")
    assert build_score(numpy.float32(1), 0.0).returned == "numpy.float32"
    with pytest.raises(RewardError, match="a dict without 'reward'"):
        build_score({"score": 1.0}, 0.0)


def test_missing_rewards_and_odd_types(config: ExperimentConfig) -> None:
    scores = [build_score(result, 0.0) for result in (None, True, 1.0)]
    trial = Trial("m", is_stand_in=False, trajectories=[_make()], scores=scores)
    found = {finding.code: finding for finding in find_in_trial(config, trial)}
    assert found["reward_missing"].severity is Severity.WARNING
    assert found["reward_type"].severity is Severity.NOTE
    assert "bool" in found["reward_type"].found


def test_the_cost_of_a_step(config: ExperimentConfig) -> None:
    scores = [Score(reward=1.0, run_seconds=0.5)]
    cost = measure_step_cost(config, [_make(), _make()], scores)
    assert cost is not None
    assert cost.num_trajectories == 16 * 8
    assert cost.step_completion_tokens == 128 * 5
    assert cost.step_prompt_tokens == 128 * 10
    # Two waves of 64 with a second outside of calls; 128 rewards by four processes.
    assert cost.compute_seconds(config) == {"agents": 2.0, "rewards": 16.0, "rollouts": 16.0}
    assert measure_step_cost(config, [replace(_make(), interactions=())], []) is None


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        ("model.path: there is none. Type model.path=x", 2),
        ("the builder returned None: is there a return?\nA builder may return\n  - this", 2),
        ("it is a plain function, so nothing awaited it: write async def", 2),
        ("no such thing", 1),
    ],
)
def test_messages_are_parted_into_what_was_found_and_what_to_do(message: str, parts: int) -> None:
    found, remedy = split_advice(message)
    assert found
    assert bool(remedy) == (parts == 2)
    assert f"{found} {remedy}".split() == message.split()


def test_the_overrides_of_errors_are_typed_next(config: ExperimentConfig) -> None:
    def make(severity: Severity, remedy: str) -> Finding:
        return Finding(code="x", severity=severity, found="f", remedy=remedy)

    report = CheckReport(config)
    assert report.verdict == "ready: 0 errors, 0 warnings"
    report.findings.append(make(Severity.WARNING, "Type seed=3"))
    assert report.verdict.startswith("ready, with doubts")
    assert report.typed_remedies == []
    report.findings.append(make(Severity.ERROR, "Type a.b=1 c=2; or something else"))
    report.findings.append(make(Severity.ERROR, "Let it be"))
    assert report.verdict.startswith("not ready: 2 errors, 1 warning.")
    assert report.typed_remedies == ["a.b=1", "c=2"]


def test_tasks_are_spread_over_the_rows() -> None:
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(2, 4) == [0, 1]


def test_the_place_of_a_stall_is_the_users_innermost_line() -> None:
    stack = '  File "/me/agent.py", line 3, in solve\n    f()\n'
    stack += '  File "/me/agent.py", line 9, in f\n    time.sleep(1)\n'
    place = find_place(stack)
    assert place is not None
    assert place.endswith("agent.py:9 in f")
    imported = stack + '  File "<frozen importlib._bootstrap>", line 1, in _load\n'
    assert find_place(imported) is None
    assert find_place("") is None
