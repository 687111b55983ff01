"""Order, concurrency, staleness and dynamic sampling; failures of whole batches; kills."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.errors import DatasetError, RolloutFailedError, RunError, StoreError
from agentrl_cli.records import Boundary, Failure, Interaction, Trajectory
from agentrl_cli.rollout.dataset import TaskStream, build_eval_tasks, list_outcomes
from agentrl_cli.rollout.scheduler import RolloutScheduler, StepGroups, run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.scores import compute_score

FAILURE = Failure(boundary=Boundary.AGENT, kind="KeyError", message="'x'", traceback="tb")


def rows(count):
    return [{"i": i} for i in range(count)]


class FakeWorkflow(RolloutWorkflow):
    """Notes when trajectories start and end. ``ending(attempt)`` gives their reward, None for a
    failure, an exception that is raised, or ``hang``."""

    def __init__(self, ending=lambda _attempt: 1.0, timing_seed=0):
        self.ending = ending
        self.random = random.Random(timing_seed)
        self.version = 0
        self.started = []
        self.num_running = self.most_running = self.num_cancelled = 0

    async def arun_episode(self, engine, data):
        raise AssertionError("the scheduler calls arun_trajectory")

    async def arun_trajectory(self, engine, attempt):
        self.started.append((attempt.step, attempt.id, self.version))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            for _ in range(self.random.randrange(6)):
                await asyncio.sleep(0)
            reward = self.ending(attempt)
            if reward == "hang":
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if isinstance(reward, BaseException):
            raise reward
        return attempt.begin_trajectory(
            reward=reward,
            failure=FAILURE if reward is None else None,
            interactions=(Interaction(id="call"),),
        )


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

    def schedule(self, workflow, stream=None, **options):
        return RolloutScheduler(
            workflow,
            None,
            stream or self.build_stream(),
            rollout=RolloutConfig(
                max_concurrent=self.max_concurrent, max_staleness=self.max_staleness
            ),
            n_samples=self.n_samples,
            **{"first_step": 1, "last_step": self.last_step, **options},
        )

    def judge(self, attempt):
        """A reward that is a function of the task, the group and the sample."""
        if int(attempt.task.task_id) in self.flat_tasks:
            return 1.0
        chance = random.Random(attempt.task.group_id)
        if chance.random() < 0.1:
            return None if attempt.sample_index else 0.0
        return float(attempt.sample_index % 2) if chance.random() < 0.7 else 0.0


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

    scheduler = setting.schedule(
        workflow,
        stream,
        first_step=first_step,
        on_finished=lambda trajectory: disk.waiting.update({trajectory.id: trajectory}),
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
    return len({t.reward for t in group} - {None}) > 1


@settings(max_examples=40, deadline=None)
@given(setting=settings_of_runs(), timing_seed=st.integers(0, 10**6))
def test_batches_are_whole_and_limits_hold(setting, timing_seed):
    workflow, disk = FakeWorkflow(setting.judge, timing_seed), Disk()
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
    if not setting.num_backup_tasks:
        assert all(a <= b for a, b in pairwise(step for step, _, _ in workflow.started))
    ids = [id_ for _, id_, _ in workflow.started]
    assert sorted(ids) == sorted(t.id for batch in disk.steps.values() for t in batch)


@settings(max_examples=40, deadline=None)
@given(setting=settings_of_runs(), timing_seeds=st.lists(st.integers(0, 10**6), max_size=4))
def test_killed_at_any_point_a_run_has_the_same_batches(setting, timing_seeds):
    """Trajectories end in another order after each kill, and nothing else is different."""
    undisturbed = Disk()
    asyncio.run(train(setting, FakeWorkflow(setting.judge), undisturbed))
    disk = Disk()
    for seed in timing_seeds:
        workflow = FakeWorkflow(setting.judge, seed)
        max_ticks = random.Random(seed).randrange(120)
        asyncio.run(train(setting, workflow, disk, max_ticks=max_ticks))
    workflow = FakeWorkflow(setting.judge, 7)
    before = set(disk.waiting)
    asyncio.run(train(setting, workflow, disk))
    assert describe(disk) == describe(undisturbed)
    # What had ended before the last kill was not made again.
    assert not before & {id_ for _, id_, _ in workflow.started}
    assert not disk.waiting


def test_a_group_that_replaces_may_be_replaced():
    stream = TaskStream(rows(9), batch_size=2, shuffle=False, seed=1, num_backup_tasks=3)
    rewards = {0: (1, 1), 1: (0, 1), 2: (0, 0), 3: (1, 0)}
    groups = StepGroups(1, stream.batch(1), stream.backup_tasks(1), 2)
    pending = list(groups.first_attempts)
    while pending:
        attempt = pending.pop(0)
        reward = rewards[int(attempt.task.task_id)][attempt.sample_index]
        call = Interaction(id="call")
        pending += groups.add(attempt.begin_trajectory(reward=float(reward), interactions=(call,)))
    assert groups.is_complete
    first_of_groups = groups.list_trajectories()[::2]
    assert [(t.group_id, t.task_id, t.replaced_by) for t in first_of_groups] == [
        ("000001.000", "0", "000001.002"),
        ("000001.001", "1", None),
        ("000001.002", "2", "000001.003"),
        ("000001.003", "3", None),
    ]


async def test_an_earlier_steps_replacement_goes_before_later_steps():
    setting = Setting(
        num_rows=12, batch_size=2, max_staleness=2, max_concurrent=1,
        num_backup_tasks=1, flat_tasks=frozenset({0}),
    )  # fmt: skip
    workflow = FakeWorkflow(setting.judge)
    await train(setting, workflow, Disk())
    started = [id_ for _, id_, _ in workflow.started]
    # One runs at a time. When the first group is over, the second of step 1 waits already;
    # the replacement comes after it and before step 2.
    assert started[:7] == [
        "000001.000/0", "000001.000/1", "000001.001/0", "000001.001/1",
        "000001.002/0", "000001.002/1", "000002.000/0",
    ]  # fmt: skip


async def test_a_run_in_which_nothing_works_stops_in_spite_of_backup_tasks():
    setting = Setting(num_rows=9, batch_size=2, num_backup_tasks=3, shuffle=True)
    workflow, told = FakeWorkflow(lambda _: None), []
    scheduler = setting.schedule(workflow, on_backup_task=lambda *what: told.append(what))
    with pytest.raises(RolloutFailedError, match="all 10 trajectories failed") as caught:
        await scheduler.next_batch(1)
    await scheduler.close()
    assert (len(workflow.started), told) == (10, [(1, 2)] * 3)
    assert {t.group_id for t in caught.value.trajectories if t.replaced_by} == {
        "000001.000", "000001.001", "000001.002",
    }  # fmt: skip


async def test_a_finished_trajectory_of_another_task_is_made_again():
    """A program's own task had the place of the dataset's; nobody knows it after a restart."""
    setting = Setting(num_rows=4, batch_size=1, last_step=1)
    own = Trajectory(id="000001.000/0", group_id="000001.000", task_id="mine", step=1, reward=5.0)
    disk, workflow = Disk(waiting={own.id: own}), FakeWorkflow(setting.judge)
    await train(setting, workflow, disk)
    assert sorted(id_ for _, id_, _ in workflow.started) == ["000001.000/0", "000001.000/1"]
    assert {t.task_id for t in disk.steps[1]} == {"0"}


PLAIN = Setting(num_rows=7, batch_size=3, last_step=4, shuffle=True, max_concurrent=64)


async def test_generation_runs_ahead_of_training_exactly_as_far_as_allowed():
    workflow = FakeWorkflow()
    scheduler = replace(PLAIN, last_step=9, max_staleness=2).schedule(workflow)
    await scheduler.next_batch(1)
    await asyncio.sleep(0.02)
    # Version 0 may sample for the steps that train versions 0, 1 and 2.
    assert {step for step, _, _ in workflow.started} == {1, 2, 3}
    scheduler.set_policy_version(1)
    await asyncio.sleep(0.02)
    assert {step for step, _, _ in workflow.started} == {1, 2, 3, 4}
    await scheduler.close()


async def test_a_batch_whose_weights_never_come_is_refused_instead_of_awaited():
    scheduler = PLAIN.schedule(FakeWorkflow())
    await scheduler.next_batch(1)
    with pytest.raises(RunError, match="step 2 needs policy version 1 or newer"):
        await scheduler.next_batch(2)
    scheduler.set_policy_version(1)
    assert len(await scheduler.next_batch(2)) == 6
    with pytest.raises(RunError, match="the next one is 3 of 1 to 4"):
        await scheduler.next_batch(2)
    await scheduler.close()


async def test_close_cancels_what_runs_and_wakes_who_waits():
    workflow = FakeWorkflow(lambda _: "hang")
    scheduler = replace(PLAIN, max_concurrent=4).schedule(workflow)
    waiting = asyncio.create_task(scheduler.next_batch(1))
    await asyncio.sleep(0.02)
    assert scheduler.num_running == 4
    await scheduler.close()
    await scheduler.close()
    with pytest.raises(RunError, match="closed"):
        await waiting
    assert workflow.num_cancelled == 4
    assert len(asyncio.all_tasks()) == 1
    with pytest.raises(RunError, match="closed"):
        await scheduler.next_batch(1)


NOTHING_WORKS = r"all 6 trajectories failed(.|\n)*'agent' with KeyError: 'x'(.|\n)*\| tb\nRun the"
NOT_CALLED = r"step 1: none of 6 trajectories called the model"
NOT_SCORED = r"step 1: none of 6 trajectories has a reward, and 3 of them ended without.*return a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None, "failure": FAILURE}, NOTHING_WORKS),
        # As when agents make clients of their own, which speak to another model.
        ({"interactions": ()}, NOT_CALLED),
        # As when a reward function forgets to return.
        ({"reward": None}, NOT_SCORED),
    ],
)
async def test_a_batch_in_which_nothing_works_stops_with_advice(change, message):
    class Failing(FakeWorkflow):
        survivors = ()

        async def arun_trajectory(self, engine, attempt):
            made = await super().arun_trajectory(engine, attempt)
            return made if attempt.id in self.survivors else replace(made, **change)

    workflow = Failing(lambda attempt: None if attempt.sample_index == 0 else 1.0)
    scheduler = PLAIN.schedule(workflow)
    with pytest.raises(RolloutFailedError, match=message) as caught:
        await scheduler.next_batch(1)
    assert len(caught.value.trajectories) == 6
    await scheduler.close()
    # One trajectory that is as it should be is enough to go on.
    workflow.survivors = ("000001.001/1",)
    scheduler = PLAIN.schedule(workflow)
    assert len(await scheduler.next_batch(1)) == 6
    await scheduler.close()


def raise_full(_trajectory):
    raise StoreError("no space left")


@pytest.mark.parametrize(
    ("error", "on_finished"),
    [
        (DatasetError("row 3"), None),
        (ValueError("bug"), None),
        (SystemExit(1), None),
        (StoreError("no space left"), raise_full),
    ],
)
async def test_what_is_not_data_reaches_the_trainer(error, on_finished):
    workflow = FakeWorkflow(lambda a: error if a.sample_index == 1 else 1.0)
    scheduler = replace(PLAIN, max_concurrent=2).schedule(workflow, on_finished=on_finished)
    with pytest.raises(type(error)):
        await scheduler.next_batch(1)
    assert len(workflow.started) < 6
    await scheduler.close()
    assert len(asyncio.all_tasks()) == 1


async def test_run_tasks_keeps_order_and_limits_concurrency():
    workflow, kept = FakeWorkflow(timing_seed=1), []
    tasks = build_eval_tasks(rows(7))
    trajectories = await run_tasks(
        workflow, None, tasks, n_samples=2, max_concurrent=3, on_finished=kept.append
    )
    assert [t.id for t in trajectories] == [f"{t.group_id}/{i}" for t in tasks for i in range(2)]
    assert len(kept) == 14
    assert workflow.most_running == 3
    assert len(asyncio.all_tasks()) == 1


async def test_run_tasks_ends_on_mistakes_cancellation_and_total_failure():
    options = {"n_samples": 1, "max_concurrent": 2, "step": 4}
    tasks = build_eval_tasks(rows(7))
    with pytest.raises(DatasetError):
        await run_tasks(FakeWorkflow(lambda _: DatasetError("x")), None, tasks, **options)
    with pytest.raises(RolloutFailedError, match="evaluation after step 4"):
        await run_tasks(FakeWorkflow(lambda _: None), None, tasks, **options)
    hanging = FakeWorkflow(lambda _: "hang")
    task = asyncio.create_task(run_tasks(hanging, None, tasks, **options))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hanging.num_cancelled == 2
    assert len(asyncio.all_tasks()) == 1
