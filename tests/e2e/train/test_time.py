"""Where the time of a run goes: metrics that add up to it, and a trace, of a run that is killed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.monitor.step_clock import (
    BETWEEN_PARTS,
    STEP_PARTS,
    TRAJECTORY_PARTS,
    describe_time,
)

TRAIN = (
    *("train", "--config", "experiment.yaml", "train.trace=true", "train.total_steps=1000"),
    *("train.num_minibatches=2", "train.save_every_steps=2", "train.eval_every_steps=1"),
    *("valid_dataset.path=rows.jsonl", "valid_dataset.limit=2"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_parts_of_steps_add_up_to_the_time_that_passed(
    project: Path,
    agentrl: Callable[..., Any],
    wait_until: Callable[..., Any],
    read_trace: Callable[[Path], list[dict[str, Any]]],
) -> None:
    run = project / "runs" / "small" / "t0"
    metrics = run / "metrics.jsonl"
    process = agentrl(*TRAIN)
    try:
        wait_until(process, lambda: metrics.is_file() and metrics.read_text().count("\n") >= 3)
    finally:
        process.kill()
        process.communicate()

    lines = RunFolder.open(run).read_metrics()
    for line in lines:
        seconds, parts = line["step_seconds"], math.fsum(line[name] for name in STEP_PARTS)
        assert parts <= seconds
        assert seconds - parts < 0.1 + 0.1 * seconds, line
        assert 0.0 < line["logprob_seconds"] < line["train_seconds"]
        of_agents = math.fsum(line[name] for name in TRAJECTORY_PARTS)
        expected = line["trajectory_seconds_mean"] * line["num_trajectories"]
        assert of_agents == pytest.approx(expected)
        assert line["evaluation_seconds"] > 0.0
    # A checkpoint counts in the line that comes after it.
    assert [line["save_seconds"] > 0.0 for line in lines[:1] + lines[2:3]] == [False, True]
    assert len(describe_time(lines)) == 2

    events = read_trace(run / "trace.json")
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    rollouts = [e for e in phases if e["name"] == "rollout"]
    probes = [e for e in phases if e["name"] == "probe"]
    num_steps = len(rollouts)
    assert num_steps >= 2
    # Two publications come before the first step.
    last = probes[1 + num_steps]
    passed = (last["ts"] + last["dur"] - rollouts[0]["ts"]) / 1e6
    counted = math.fsum(line["step_seconds"] for line in lines[:num_steps])
    counted += math.fsum(line[name] for line in lines[1:num_steps] for name in BETWEEN_PARTS)
    assert counted == pytest.approx(passed, rel=0.05, abs=0.1)

    names = [e["name"] for e in events]
    assert {"logprobs", "updates", "evaluation", "store", "policy version 2"} <= set(names)
    num_shown = sum(name.startswith("trajectory ") for name in names)
    num_evaluated = sum(name.startswith("trajectory eval-") for name in names)
    assert num_evaluated == 2 * names.count("evaluation")
    num_trained = sum(line["num_trajectories"] for line in lines[:num_steps])
    assert num_shown == num_trained + num_evaluated
    assert names.count("model call") + names.count("reward") > num_shown
