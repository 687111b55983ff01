"""The deadline of a batch holds in the worst case: every trajectory slow, every group replaced."""

from __future__ import annotations

import asyncio
import random
from contextlib import closing
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction
from agentrl_cli.rollout.dataset import build_task_stream
from agentrl_cli.rollout.scheduler import RolloutScheduler
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.train.loop import RunCoordinator

TRAJECTORY_SECONDS = 660.0
#: Of a trajectory's time, its reward function's.
REWARD_SECONDS = 60.0
#: What a deadline leaves besides, for whatever is not a trajectory.
MARGIN_SECONDS = 60.0


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        select = self._selector.select

        def jump(timeout=None):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


class SlowWorkflow(RolloutWorkflow):
    """Every reward is the same; the longest trajectories take all the time that they have."""

    def __init__(self, generator, is_always_slow):
        self.generator = generator
        self.is_always_slow = is_always_slow

    async def arun_episode(self, engine, data):
        raise AssertionError("the scheduler calls arun_trajectory")

    async def arun_trajectory(self, engine, attempt):
        share = 1.0 if self.is_always_slow else self.generator.choice([0.0, 0.4, 1.0])
        await asyncio.sleep(share * TRAJECTORY_SECONDS)
        return attempt.begin_trajectory(reward=1.0, interactions=(Interaction(id="call"),))


def build_config(batch_size, n_samples, max_backup_tasks, max_staleness, max_concurrent):
    rollout = {
        "max_staleness": max_staleness,
        "max_concurrent": max_concurrent,
        "timeout_seconds": TRAJECTORY_SECONDS - REWARD_SECONDS,
        "reward_timeout_seconds": REWARD_SECONDS,
        "reward_workers": 4,
    }
    if max_backup_tasks:
        rollout["filter"] = {"kind": "dynamic_sampling", "max_backup_tasks": max_backup_tasks}
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "e",
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "gconfig": {"n_samples": n_samples},
            "train_dataset": {"path": "d", "batch_size": batch_size},
            "rollout": rollout,
            "train": {"total_steps": 4},
        }
    )


def compute_deadline(config):
    return RunCoordinator.compute_deadline(SimpleNamespace(config=config))


@settings(max_examples=60, deadline=None)
@given(
    batch_size=st.integers(1, 4),
    n_samples=st.integers(2, 4),
    max_backup_tasks=st.integers(0, 4),
    max_staleness=st.integers(0, 2),
    max_concurrent=st.integers(1, 12),
    is_always_slow=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_no_batch_takes_longer_than_its_deadline(
    batch_size, n_samples, max_backup_tasks, max_staleness, max_concurrent, is_always_slow, seed
):
    config = build_config(batch_size, n_samples, max_backup_tasks, max_staleness, max_concurrent)
    longest = compute_deadline(config) - MARGIN_SECONDS
    generator = random.Random(seed)

    async def train(loop):
        scheduler = RolloutScheduler(
            SlowWorkflow(generator, is_always_slow),
            None,
            StepPlanner(
                build_task_stream(config, [{}] * 30),
                n_samples=n_samples,
                max_staleness=max_staleness,
                max_trajectory_age=config.rollout.max_trajectory_age,
                first_step=1,
                last_step=4,
            ),
            max_concurrent=max_concurrent,
        )
        scheduler.set_policy_version(0)
        for step in range(1, 5):
            asked = loop.time()
            await scheduler.next_batch(step)
            assert loop.time() - asked <= longest + 1e-6
            await asyncio.sleep(generator.choice([0.0, 500.0]))
            scheduler.set_policy_version(step)
        await scheduler.close()

    with closing(JumpingLoop()) as loop:
        loop.run_until_complete(train(loop))


@pytest.mark.parametrize(
    ("max_backup_tasks", "num_waves", "num_reward_waves"), [(0, 6, 12), (2, 9 + 3, 18)]
)
def test_the_deadline_by_hand(max_backup_tasks, num_waves, num_reward_waves):
    # 4 groups of 4 for 3 steps are 48 trajectories, 6 times 8; with 2 backup tasks a step 72,
    # 9 times 8, and 3 groups may follow each other while places are free. Four reward workers
    # take them four at a time. And each may be made once more.
    config = build_config(4, 4, max_backup_tasks, max_staleness=2, max_concurrent=8)
    seconds = num_waves * TRAJECTORY_SECONDS + num_reward_waves * REWARD_SECONDS
    assert compute_deadline(config) == 2 * (MARGIN_SECONDS + seconds)
