"""Two trainer processes on the embedded engine: one is killed, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli.store.run_folder import RunFolder
from tests.e2e.train.run_progress import count_steps, find_rank

NUM_STEPS = 6
ARGUMENTS = (
    "train",
    "--config",
    "experiment.yaml",
    f"train.total_steps={NUM_STEPS}",
    "train.save_every_steps=2",
    "rollout.max_staleness=0",
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_rank_is_killed_and_the_run_is_that_of_one_process(
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
    read_every_task_once: Callable[[Path, int], object],
) -> None:
    run_dir = project / "runs" / "small" / "two"
    command = agentrl(*ARGUMENTS, "trial_name=two", "train.num_processes=2")
    wait_until(command, lambda: count_steps(run_dir) >= 3)
    below = psutil.Process(command.pid).children(recursive=True)
    os.kill(find_rank(below, 1).pid, signal.SIGKILL)
    output = finish(command)
    assert "was killed by SIGKILL in rank 1 of 2 (trainer-1); it is started again" in output
    read_every_task_once(run_dir, NUM_STEPS)

    finish(agentrl(*ARGUMENTS, "trial_name=one"))
    names = ("reward_mean", "loss", "grad_norm", "completion_tokens_mean")
    lines = [RunFolder.open(run_dir.parent / trial).read_metrics() for trial in ("two", "one")]
    for found, expected in zip(*lines, strict=True):
        assert [found[n] for n in names] == pytest.approx(
            [expected[n] for n in names], rel=1e-3, abs=1e-5
        )

    more = (*ARGUMENTS, "trial_name=two", "train.total_steps=7", "train.num_processes=1")
    output = finish(agentrl(*more))
    assert f"resuming after step {NUM_STEPS}" in output
    assert count_steps(run_dir) == NUM_STEPS + 1
