"""``agentrl train --seeds``: several runs of one configuration, and the mean over them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store.run_folder import RunFolder

TRAIN = ("train", "--config", "c.yaml")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def folder(folder: Path) -> Path:
    config = folder / "c.yaml"
    one_step = "rollout: {max_staleness: 0}\ntrain: {total_steps: 1,"
    config.write_text(config.read_text().replace("train: {total_steps: 5000,", one_step))
    return folder


def test_seeds_are_runs_of_their_own_and_one_that_fails_keeps_no_other(
    folder: Path, run_here: Callable[..., str], finish: Callable[..., str]
) -> None:
    assert "--seeds 1,2,3" in run_here(2, *TRAIN, "--seeds", "one")
    printed = finish(*TRAIN, "--seeds", "1,2", "--dry-run")
    assert "trial_name: t0-seed1\n" in printed
    assert "trial_name: t0-seed2\n" in printed
    assert not (folder / "runs").exists()

    finish(*TRAIN, "seed=1", "trial_name=t0-seed1")
    # A run that was made with other settings cannot be resumed with these.
    other = folder / "runs" / "demo" / "t0-seed2"
    other.mkdir()
    (other / "config.yaml").write_text((folder / "c.yaml").read_text())
    text = run_here(1, *TRAIN, "--seeds", "1,2,3")
    assert "its last step is done already" in text
    assert "this run was started with another configuration" in text
    assert text.count("step 1/1") == 1, text
    assert "--curves runs/demo/t0-seed1 runs/demo/t0-seed3 --html curves.html" in text
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()}
    assert rows["2"] == ["2", "exit", "code", "2"]
    for seed in ("1", "3"):
        run = RunFolder.open(folder / "runs" / "demo" / f"t0-seed{seed}")
        reward = f"{run.read_metrics()[0]['reward_mean']:.3f}"
        evals = [f"{run.read_eval_report(step)['mean_reward']:.3f}" for step in (0, 1)]
        assert rows[seed] == [seed, reward, reward, *evals]
    means = (float(rows["1"][1]) + float(rows["3"][1])) / 2
    assert float(rows["mean"][1]) == pytest.approx(means, abs=0.0011)


def test_a_stop_ends_all_seeds_and_the_same_command_resumes(
    folder: Path, start: Callable[..., Any], finish: Callable[..., str]
) -> None:
    command = start(*TRAIN, "--seeds", "1,2", "train.total_steps=5000")
    command.signal(signal.SIGTERM, at="\nstep 2/")
    assert command.end() == 143, command.text
    assert "not begun" in command.text
    assert not (folder / "runs" / "demo" / "t0-seed2").exists()
    done = len(RunFolder.open(folder / "runs" / "demo" / "t0-seed1").read_metrics())
    again = finish(*TRAIN, "--seeds", "1", f"train.total_steps={done + 1}")
    assert f"resuming after step {done}" in again
