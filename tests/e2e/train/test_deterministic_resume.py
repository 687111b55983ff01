"""A run that was killed and one that never stopped: the same trajectories, the same losses.

Everything that decides a sampled token is fixed: one trajectory at a time, by the newest
weights, on one thread. What the resumed run has from disk and what it makes anew must then be
what the other one made.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder

NUM_STEPS = 5
ARGUMENTS = (
    *("train", "--config", "experiment.yaml", f"train.total_steps={NUM_STEPS}"),
    *("train.save_every_steps=2", "train.num_epochs=2", "train.num_minibatches=2"),
    *("train.learning_rate_schedule=cosine", "train.num_threads=1", "engine.num_threads=1"),
    *("train_dataset.batch_size=2", "gconfig.n_samples=3"),
    *("rollout.max_concurrent=1", "rollout.max_staleness=0"),
)
METRICS = ("loss", "grad_norm", "approx_kl", "entropy", "learning_rate", "reward_mean")


def strip_clocks(trajectories: list[Trajectory]) -> list[object]:
    """What was sampled and scored, without what tells the time or is an id made of it."""
    return [
        (
            trajectory.id,
            trajectory.reward,
            [(i.prompt_ids, i.completion_ids, i.versions) for i in trajectory.interactions],
        )
        for trajectory in trajectories
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_losses_equal_those_of_a_run_that_never_stopped(
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    wait_until: Callable[..., Any],
) -> None:
    finish(agentrl(*ARGUMENTS, "trial_name=whole"))
    run_dir, moments = project / "runs" / "small" / "broken", random.Random(8)
    for num_whole in (1, 3):
        command = agentrl(*ARGUMENTS, "trial_name=broken")
        # In the midst of a step's rollouts: some have ended, one is in progress, some wait.
        wait_until(command, (run_dir / f"trajectories/step-{num_whole:06d}.parquet").is_file)
        wait_until(command, lambda: any((run_dir / "pending").glob("*.jsonl")))
        time.sleep(moments.uniform(0.0, 0.2))
        command.kill()
        command.communicate()
    finish(agentrl(*ARGUMENTS, "trial_name=broken"))
    expected, found = (RunFolder.open(project / "runs/small" / t) for t in ("whole", "broken"))
    for step in range(1, NUM_STEPS + 1):
        one, other = expected.read_trajectories(step), found.read_trajectories(step)
        assert strip_clocks(other) == strip_clocks(one), f"step {step}"
        logprobs, logprobs_found = (
            [p for t in batch for i in t.interactions for p in i.rollout_logprobs]
            for batch in (one, other)
        )
        assert logprobs_found == pytest.approx(logprobs, abs=1e-6), f"step {step}"
    lines, lines_found = expected.read_metrics(), found.read_metrics()
    assert [line["step"] for line in lines_found] == list(range(1, NUM_STEPS + 1))
    for line, line_found in zip(lines, lines_found, strict=True):
        for name in METRICS:
            assert line_found[name] == pytest.approx(line[name], rel=1e-6, abs=1e-6), name
    # Else nothing was learned, and everything would be equal.
    assert any(line["grad_norm"] > 0 for line in lines)
    assert list((found.path / "pending").iterdir()) == []
