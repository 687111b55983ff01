"""Kill the command at any moment; typed again, it finishes, and no task is lost or repeated."""

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

# The fixtures of conftest.py.
Start = Callable[..., subprocess.Popen[str]]
Finish = Callable[..., str]
Wait = Callable[..., Any]
Read = Callable[[Path, int], list[list[Trajectory]]]

NUM_STEPS = 10
#: ``rollout.max_trajectory_age``.
MAX_AGE = 8
ARGUMENTS = (
    "train",
    "--config",
    "experiment.yaml",
    f"train.total_steps={NUM_STEPS}",
    "train.save_every_steps=3",
    "rollout.max_staleness=1",
)


def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_three_times_the_run_finishes_with_every_task_once(
    project: Path, agentrl: Start, finish: Finish, wait_until: Wait, read_every_task_once: Read
) -> None:
    run_dir = project / "runs" / "small" / "t0"
    moments = random.Random(20)
    last_steps = []
    for kill in range(3):
        # A random moment after some steps of progress: while rolling out, training,
        # publishing or saving, whatever it falls on.
        process = agentrl(*ARGUMENTS)
        seen = count_lines(run_dir / "metrics.jsonl")
        wanted = min(seen + moments.randint(1, 3), NUM_STEPS - 1) if kill else 0
        wait_until(process, run_dir.is_dir)
        wait_until(process, lambda n=wanted: count_lines(run_dir / "metrics.jsonl") >= n)
        time.sleep(moments.uniform(0.0, 1.0))
        process.kill()
        process.communicate()
        last_steps.append(count_lines(run_dir / "metrics.jsonl"))
    finish(agentrl(*ARGUMENTS))
    for step, trajectories in enumerate(read_every_task_once(run_dir, NUM_STEPS), start=1):
        versions = {v for t in trajectories for i in t.interactions for v in i.versions}
        assert versions <= set(range(step - 1 - MAX_AGE, step))
    assert max(last_steps) > 0, "no kill came after a step: the test shows nothing"


SLOW_AGENT = '''
import asyncio, random

async def answer(data, client):
    """Asks twice; one time in fifty its tool takes as long as many steps do."""
    delays = random.Random()
    messages = [{"role": "user", "content": data["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "More."})
        await asyncio.sleep(delays.choice([0.0, 0.01, 0.05]) if delays.random() < 0.98 else 2.0)
    return messages[1]["content"]


def build():
    return answer
'''


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200_steps_with_long_tails_are_killed_ten_times_and_lose_nothing(
    project: Path, agentrl: Start, finish: Finish, wait_until: Wait, read_every_task_once: Read
) -> None:
    (project / "slow_agent.py").write_text(SLOW_AGENT)
    arguments = (
        *ARGUMENTS[:3],
        "agent_builder_path=slow_agent.build",
        "train.total_steps=200",
        "train.save_every_steps=20",
        "rollout.max_staleness=2",
        "rollout.max_concurrent=48",
        "gconfig.max_tokens=4",
    )
    run_dir = project / "runs" / "small" / "t0"
    moments = random.Random(7)
    for kill in range(10):
        process = agentrl(*arguments)
        wanted = 20 * kill + moments.randint(1, 15)
        wait_until(process, lambda n=wanted: count_lines(run_dir / "metrics.jsonl") >= n)
        time.sleep(moments.uniform(0.0, 0.5))
        process.kill()
        process.communicate()
    finish(agentrl(*arguments))
    ages = set()
    num_moved = 0
    for step, trajectories in enumerate(read_every_task_once(run_dir, 200), start=1):
        assert [t.failure for t in trajectories] == [None] * len(trajectories)
        versions = {v for t in trajectories for i in t.interactions for v in i.versions}
        ages |= {step - 1 - v for v in versions}
        num_moved += any(int(t.group_id.partition(".")[0]) != step for t in trajectories)
    assert ages <= set(range(MAX_AGE + 1))
    assert max(ages) > 2, "no slow trajectory was passed over: the test shows nothing"
    assert num_moved > 50


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interrupted_run_learns_what_an_undisturbed_one_does(
    project: Path, agentrl: Start, finish: Finish, wait_until: Wait
) -> None:
    arguments = (*ARGUMENTS[:3], "train.total_steps=5", "rollout.max_staleness=0")
    whole = agentrl(*arguments, "trial_name=whole")
    broken = agentrl(*arguments, "trial_name=broken")
    metrics = project / "runs" / "small" / "broken" / "metrics.jsonl"
    wait_until(broken, lambda: count_lines(metrics) >= 3)
    broken.kill()
    broken.communicate()
    again = agentrl(*arguments, "trial_name=broken")
    assert "stored trajectories are used again" in finish(again)
    finish(whole)
    names = ("reward_mean", "loss", "grad_norm", "completion_tokens_mean")
    lines = [RunFolder.open(metrics.parents[1] / t).read_metrics() for t in ("whole", "broken")]
    for one, other in zip(*lines, strict=True):
        assert [one[n] for n in names] == pytest.approx(
            [other[n] for n in names], rel=1e-4, abs=1e-6
        )
