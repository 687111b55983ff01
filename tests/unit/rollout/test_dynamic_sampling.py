"""Dynamic sampling: counts, limits, order, kills at any point."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.rollout.dataset import TaskStream, list_outcomes
from agentrl_cli.rollout.scheduler import RolloutScheduler, StepGroups
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.scores import compute_score


def rows(count):
    return [{"i": i} for i in range(count)]


class ScoringWorkflow(RolloutWorkflow):
    """Rewards that are a function of the task, the group and the sample, given at some time."""

    def __init__(self, flat_tasks, timing_seed=0):
        self.flat_tasks = flat_tasks
        self.random = random.Random(timing_seed)
        self.version = 0
        self.started = []
        self.num_running = self.most_running = 0

    async def arun_episode(self, engine, data):
        raise AssertionError("the scheduler calls arun_trajectory")

    async def arun_trajectory(self, engine, attempt):
        self.started.append((attempt.step, attempt.id, self.version))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(self.random.randrange(6)):
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        return attempt.begin_trajectory(
            reward=self.judge(attempt), interactions=(Interaction(id="call"),)
        )

    def judge(self, attempt):
        if int(attempt.task.task_id) in self.flat_tasks:
            return 1.0
        chance = random.Random(attempt.task.group_id)
        return float(attempt.sample_index % 2) if chance.random() < 0.7 else 0.0


@dataclass(frozen=True)
class Setting:
    """What a run is made of; ``build_stream`` gives a new stream, as every start does."""

    num_rows: int
    batch_size: int
    n_samples: int = 2
    last_step: int = 3
    max_staleness: int = 0
    max_concurrent: int = 4
    num_backup_tasks: int = 0
    shuffle: bool = False
    max_cooldown_epochs: int | None = None
    flat_tasks: frozenset[int] = frozenset()

    def build_stream(self):
        return TaskStream(
            rows(self.num_rows),
            batch_size=self.batch_size,
            shuffle=self.shuffle,
            seed=3,
            num_backup_tasks=self.num_backup_tasks,
            max_staleness=self.max_staleness,
            max_cooldown_epochs=self.max_cooldown_epochs,
        )


@st.composite
def settings_of_runs(draw):
    num_rows = draw(st.integers(1, 12))
    return Setting(
        num_rows=num_rows,
        batch_size=draw(st.integers(1, 5)),
        n_samples=draw(st.integers(2, 4)),
        last_step=draw(st.integers(1, 6)),
        max_staleness=draw(st.integers(0, 3)),
        max_concurrent=draw(st.integers(1, 9)),
        num_backup_tasks=draw(st.integers(0, 6)),
        shuffle=draw(st.booleans()),
        max_cooldown_epochs=draw(st.one_of(st.none(), st.integers(1, 5))),
        flat_tasks=frozenset(draw(st.sets(st.integers(0, num_rows - 1)))),
    )


@dataclass
class Disk:
    """What outlives a kill: whole steps, and finished trajectories of those that are not."""

    steps: dict[int, list[Trajectory]] = field(default_factory=dict)
    waiting: dict[str, Trajectory] = field(default_factory=dict)

    def write(self, step, batch):
        self.steps[step] = batch
        for one in batch:
            self.waiting.pop(one.id, None)


async def train(setting, workflow, disk, *, max_ticks=None):
    """Trains until the last step or for so many turns of the event loop; True at the end."""
    stream = setting.build_stream()
    first_step = len(disk.steps) + 1
    for step in range(1, first_step):
        stream.batch(step)
        scores = ((t.group_id, t.task_id, compute_score(t)) for t in disk.steps[step])
        stream.observe(step, list_outcomes(scores))

    def keep(trajectory):
        disk.waiting[trajectory.id] = trajectory

    scheduler = RolloutScheduler(
        workflow,
        None,
        stream,
        rollout=RolloutConfig(
            max_concurrent=setting.max_concurrent, max_staleness=setting.max_staleness
        ),
        n_samples=setting.n_samples,
        first_step=first_step,
        last_step=setting.last_step,
        on_finished=keep,
        already_finished=list(disk.waiting.values()),
    )
    workflow.version = first_step - 1

    async def loop():
        for step in range(first_step, setting.last_step + 1):
            disk.write(step, await scheduler.next_batch(step))
            for _ in range(workflow.random.randrange(10)):
                await asyncio.sleep(0)
            workflow.version = step
            scheduler.set_policy_version(step)

    running = asyncio.create_task(loop())
    ticks = 0
    while not running.done() and (max_ticks is None or ticks < max_ticks):
        await asyncio.sleep(0)
        ticks += 1
    is_done = running.done()
    if is_done:
        running.result()
    running.cancel()
    await scheduler.close()
    return is_done


def describe(disk):
    return {
        step: [(t.group_id, t.task_id, t.sample_index, t.reward, t.replaced_by) for t in batch]
        for step, batch in disk.steps.items()
    }


def has_signal(group):
    return len({t.reward for t in group}) > 1


@settings(max_examples=40, deadline=None)
@given(setting=settings_of_runs(), timing_seed=st.integers(0, 10**6))
def test_batches_are_whole_and_limits_hold(setting, timing_seed):
    workflow, disk = ScoringWorkflow(setting.flat_tasks, timing_seed), Disk()
    asyncio.run(train(setting, workflow, disk))
    assert list(disk.steps) == list(range(1, setting.last_step + 1))
    for step, batch in disk.steps.items():
        groups = defaultdict(list)
        for one in batch:
            groups[one.group_id].append(one)
        num_groups, num_flat = len(groups), sum(not has_signal(g) for g in groups.values())
        assert all(
            [t.sample_index for t in g] == list(range(setting.n_samples)) for g in groups.values()
        )
        # Positions continue after the batch's, without a gap.
        assert list(groups) == [f"{step:06d}.{n:03d}" for n in range(num_groups)]
        replaced = {t.group_id: t.replaced_by for t in batch if t.replaced_by is not None}
        num_replaced = num_groups - setting.batch_size
        assert len(replaced) == num_replaced <= setting.num_backup_tasks
        assert list(replaced.values()) == list(groups)[setting.batch_size :]
        assert all(not has_signal(groups[name]) and name < by for name, by in replaced.items())
        assert num_replaced == min(num_flat, setting.num_backup_tasks)
        # What is trained on has as many groups as the batch has tasks.
        assert num_groups - len(replaced) == setting.batch_size
    # Step k trains version k - 1, so its tokens may be max_staleness older and no more.
    assert all(
        (step - 1) - version <= setting.max_staleness for step, _, version in workflow.started
    )
    assert workflow.most_running <= setting.max_concurrent
    ids = [id_ for _, id_, _ in workflow.started]
    assert sorted(ids) == sorted(t.id for batch in disk.steps.values() for t in batch)


@settings(max_examples=40, deadline=None)
@given(setting=settings_of_runs(), timing_seeds=st.lists(st.integers(0, 10**6), max_size=4))
def test_killed_at_any_point_a_run_has_the_same_batches(setting, timing_seeds):
    """Trajectories end in another order after each kill, and nothing else is different."""
    undisturbed = Disk()
    asyncio.run(train(setting, ScoringWorkflow(setting.flat_tasks), undisturbed))
    disk = Disk()
    for seed in timing_seeds:
        workflow = ScoringWorkflow(setting.flat_tasks, seed)
        max_ticks = random.Random(seed).randrange(120)
        asyncio.run(train(setting, workflow, disk, max_ticks=max_ticks))
    workflow = ScoringWorkflow(setting.flat_tasks, 7)
    before = set(disk.waiting)
    asyncio.run(train(setting, workflow, disk))
    assert describe(disk) == describe(undisturbed)
    # What had ended before the last kill was not made again.
    assert not before & {id_ for _, id_, _ in workflow.started}
    assert not disk.waiting


def finish_groups(stream, score, pick=lambda _: 0):
    """All trajectories of step 1, scored by position and sample, finished as picked."""
    groups = StepGroups(1, stream.batch(1), stream.backup_tasks(1), 2)
    pending = list(groups.first_attempts)
    while pending:
        attempt = pending.pop(pick(len(pending)))
        position = int(attempt.task.group_id.rpartition(".")[2])
        reward = score(position, attempt.sample_index)
        pending += groups.add(attempt.begin_trajectory(reward=reward))
    assert groups.is_complete
    return groups.list_trajectories()


@settings(max_examples=30, deadline=None)
@given(
    flat=st.lists(st.booleans(), min_size=1, max_size=12),
    batch_size=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_the_groups_of_a_step_do_not_depend_on_the_order_in_which_they_end(flat, batch_size, order):
    num_backup_tasks = max(0, len(flat) - batch_size)
    stream = TaskStream(
        rows(20), batch_size=batch_size, shuffle=True, seed=1, num_backup_tasks=num_backup_tasks
    )

    def score(position, sample_index):
        is_flat = position < len(flat) and flat[position]
        return 0.0 if is_flat else float(sample_index)

    in_any_order = finish_groups(stream, score, lambda count: order.randrange(count))
    assert in_any_order == finish_groups(stream, score)


def test_a_group_that_replaces_may_be_replaced():
    stream = TaskStream(rows(9), batch_size=2, shuffle=False, seed=1, num_backup_tasks=3)
    rewards = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0)}
    trajectories = finish_groups(stream, lambda position, index: float(rewards[position][index]))
    assert [(t.id, t.task_id, t.replaced_by) for t in trajectories] == [
        ("000001.000/0", "0", "000001.002"),
        ("000001.000/1", "0", "000001.002"),
        ("000001.001/0", "1", None),
        ("000001.001/1", "1", None),
        ("000001.002/0", "2", "000001.003"),
        ("000001.002/1", "2", "000001.003"),
        ("000001.003/0", "3", None),
        ("000001.003/1", "3", None),
    ]


def test_a_group_with_one_scored_trajectory_has_no_signal_and_is_replaced():
    stream = TaskStream(rows(4), batch_size=1, shuffle=False, seed=1, num_backup_tasks=1)
    groups = StepGroups(1, stream.batch(1), stream.backup_tasks(1), 2)
    first, second = groups.first_attempts
    failure = Failure(boundary=Boundary.TOOL, kind="KeyError", message="")
    assert groups.add(first.begin_trajectory(failure=failure)) == []
    further = groups.add(second.begin_trajectory(reward=1.0))
    assert [a.id for a in further] == ["000001.001/0", "000001.001/1"]
    assert not groups.is_complete


async def test_an_earlier_steps_replacement_goes_before_later_steps():
    setting = Setting(
        num_rows=12, batch_size=2, max_staleness=2, max_concurrent=1,
        num_backup_tasks=1, flat_tasks=frozenset({0}),
    )  # fmt: skip
    workflow = ScoringWorkflow(setting.flat_tasks)
    await train(setting, workflow, Disk())
    started = [id_ for _, id_, _ in workflow.started]
    # One runs at a time. When the first group is over, the second of step 1 waits already;
    # the replacement comes after it and before step 2.
    assert started[:7] == [
        "000001.000/0", "000001.000/1", "000001.001/0", "000001.001/1",
        "000001.002/0", "000001.002/1", "000002.000/0",
    ]  # fmt: skip


async def test_a_run_in_which_nothing_works_stops_in_spite_of_backup_tasks():
    class Failing(ScoringWorkflow):
        async def arun_trajectory(self, engine, attempt):
            self.started.append(attempt.id)
            failure = Failure(boundary=Boundary.AGENT, kind="KeyError", message="'x'")
            return attempt.begin_trajectory(failure=failure)

    setting = Setting(num_rows=9, batch_size=2, num_backup_tasks=3, shuffle=True)
    workflow = Failing(frozenset())
    with pytest.raises(RolloutFailedError, match="all 10 trajectories failed") as caught:
        await train(setting, workflow, Disk())
    assert len(workflow.started) == 10
    assert {t.group_id for t in caught.value.trajectories if t.replaced_by} == {
        "000001.000", "000001.001", "000001.002",
    }  # fmt: skip


async def test_a_finished_trajectory_of_another_task_is_made_again():
    """A program's own task had the place of the dataset's; nobody knows it after a restart."""
    setting = Setting(num_rows=4, batch_size=1, last_step=1)
    own = Trajectory(id="000001.000/0", group_id="000001.000", task_id="mine", step=1, reward=5.0)
    disk, workflow = Disk(waiting={own.id: own}), ScoringWorkflow(frozenset())
    await train(setting, workflow, disk)
    assert sorted(id_ for _, id_, _ in workflow.started) == ["000001.000/0", "000001.000/1"]
    assert {t.task_id for t in disk.steps[1]} == {"0"}


async def test_every_backup_task_is_reported():
    flat = frozenset(range(12))
    setting = Setting(num_rows=12, batch_size=3, num_backup_tasks=2, flat_tasks=flat)
    told = []
    scheduler = RolloutScheduler(
        ScoringWorkflow(setting.flat_tasks),
        None,
        setting.build_stream(),
        rollout=RolloutConfig(max_staleness=0),
        n_samples=2,
        first_step=1,
        last_step=1,
        on_backup_task=lambda step, count: told.append((step, count)),
    )
    batch = await scheduler.next_batch(1)
    await scheduler.close()
    assert told == [(1, 2), (1, 2)]
    assert len(batch) == 10
