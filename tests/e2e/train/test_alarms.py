"""Alarms as a person meets them: reported once, ending a run that resumes when typed again."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

REWARD = """
def always_zero(completions, **kwargs):
    return 0.0
"""
TRAIN = ("train", "--config", "experiment.yaml", "rollout.max_staleness=0")
#: Eight tokens are never enough in this project.
QUIET = "train.alarms.truncated.action=off"
CONSTANT = "reward_fn_path=my_rewards.always_zero"

Start = Callable[..., "subprocess.Popen[str]"]
Finish = Callable[..., str]


@pytest.fixture
def run_dir(project: Path) -> Path:
    (project / "my_rewards.py").write_text(REWARD)
    return project / "runs" / "small" / "t0"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_constant_reward_is_reported_once_and_at_the_end(
    agentrl: Start, finish: Finish, run_dir: Path
) -> None:
    output = finish(agentrl(*TRAIN, CONSTANT, QUIET, "train.total_steps=7"))
    assert output.count("alarm reward_constant: ") == 1, output
    assert "step 5: alarm reward_constant: every reward of the last 5 steps" in output
    assert "(80 trajectories) was 0, so nothing was learned" in output
    assert "the reward function does not recognize the answer" in output
    assert "groups_equal" not in output
    assert "alarm reward_constant active in steps 5-7" in output
    [command] = re.findall(r"look: agentrl (.*)", output)
    finish(agentrl(*command.split()))
    steps = finish(agentrl("inspect-trajectories", str(run_dir), "--json"))
    active = [bool(step["alarms"]) for step in json.loads(steps)["steps"]]
    assert active == [False] * 4 + [True] * 3
    assert "alarm reward_constant" in (run_dir / "logs" / "trainer.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_alarm_that_stops_ends_the_run_which_can_be_resumed(
    agentrl: Start, finish: Finish, run_dir: Path
) -> None:
    rule = "train.alarms.reward_constant"
    stop = (*TRAIN, CONSTANT, QUIET, f"{rule}.action=stop", f"{rule}.num_steps=3")
    for last_step in (3, 6):
        output = finish(agentrl(*stop, "train.total_steps=8"), 1)
        assert f"ended after step {last_step} by the alarm reward_constant" in output
        assert output.count("alarm reward_constant: every reward of the last 3 steps") == 1
        assert f"add {rule}.action=warn" in output
        folder = RunFolder.open(run_dir)
        assert [line["step"] for line in folder.read_metrics()] == [*range(1, last_step + 1)]
        latest = folder.latest_checkpoint()
        assert latest is not None
        assert latest[0] == last_step
    finish(agentrl(*stop, "train.total_steps=8", f"{rule}.action=warn"))
    assert [line["step"] for line in RunFolder.open(run_dir).read_metrics()] == [*range(1, 9)]
