"""Killed at any moment, a run folder holds whole files only, and the next start resumes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from agentrl_cli.store.layout import CHECKSUMS
from agentrl_cli.store.run_folder import RunFolder

WRITER = """
import sys
from agentrl_cli.config.config_file import load_config
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

run = RunFolder.create_or_resume(load_config(sys.argv[1]))
latest = run.latest_checkpoint()
step = latest[0] if latest else 0
run.truncate_metrics(step)
call = Interaction(id="c", completion_ids=tuple(range(3000)), versions=(0,) * 3000)
print("ready", flush=True)
while True:
    step += 1
    made = [
        Trajectory(id=f"{step}/{i}", group_id=str(step), task_id=str(i), interactions=(call,))
        for i in range(20)
    ]
    run.write_trajectories(step, made)
    run.append_metrics({"step": step, "reward_mean": 0.5})
    run.write_eval(step, made[:2], {"step": step})
    with run.new_checkpoint(step) as path:
        for name in "ab":
            (path / name).write_text(f"{step}" * 50_000)
    run.prune_checkpoints(2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_whole_after_sigkill(tmp_path: Path, make_config, write_until_killed, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2):
        assert write_until_killed(WRITER, 1, rng.uniform(0.0, 0.4)) == ["ready\n"]
    # As an inspector sees it, before anything is tidied up.
    run = RunFolder.open(tmp_path / "runs" / "exp" / "t0")
    check_whole(run)
    with RunFolder.create_or_resume(make_config()) as again:
        check_whole(again)
        hidden = {p.name for p in again.path.rglob(".*")}
        assert hidden == {".lock"}


def check_whole(run: RunFolder) -> None:
    steps = run.trajectory_steps()
    assert steps == list(range(1, len(steps) + 1))
    for step in steps:
        assert len(run.read_trajectories(step)) == 20
    for step in run.eval_steps():
        trajectories, report = run.read_eval(step)
        assert len(trajectories) == 2
        assert report == {"step": step}
    for step, path in run.list_checkpoints():
        assert {p.name for p in path.iterdir()} == {"a", "b", CHECKSUMS}
        assert all((path / name).read_text() == f"{step}" * 50_000 for name in "ab")
    lines = [m["step"] for m in run.read_metrics()]
    assert lines == list(range(1, len(lines) + 1))
    # A line of metrics is written after its trajectories.
    assert len(lines) <= len(steps)
