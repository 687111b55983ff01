"""Order, concurrency, staleness and dynamic sampling; failures of whole batches; kills."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from agentrl_cli.errors import DatasetError, RolloutFailedError, RunError, StoreError
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Boundary, Failure, Interaction
from agentrl_cli.rollout.dataset import TaskStream, build_eval_tasks
from agentrl_cli.rollout.scheduler import RolloutScheduler, run_tasks
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow import RolloutWorkflow

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


def schedule(workflow, *, max_concurrent=64, on_finished=None, observer=None, **options):
    options = {"batch_size": 3, "last_step": 4, "num_backup_tasks": 0, "max_staleness": 0} | options
    stream = TaskStream(
        rows(9),
        batch_size=options.pop("batch_size"),
        shuffle=True,
        seed=3,
        num_backup_tasks=options.pop("num_backup_tasks"),
    )
    planner = StepPlanner(stream, n_samples=2, max_trajectory_age=8, first_step=1, **options)
    scheduler = RolloutScheduler(
        workflow,
        None,
        planner,
        max_concurrent=max_concurrent,
        on_finished=on_finished,
        observer=observer,
    )
    scheduler.set_policy_version(0)
    return scheduler


async def test_all_steps_of_a_run_are_made_within_the_limit_of_what_runs():
    workflow, finished, batches = FakeWorkflow(timing_seed=5), [], []
    scheduler = schedule(
        workflow, last_step=20, max_staleness=2, max_concurrent=5, on_finished=finished.append
    )
    for step in range(1, 21):
        batches.append(await scheduler.next_batch(step))
        await asyncio.sleep(0)
        scheduler.set_policy_version(step)
    await scheduler.close()
    assert [{t.step for t in batch} for batch in batches] == [{step} for step in range(1, 21)]
    ids = [t.id for batch in batches for t in batch]
    assert len(set(ids)) == len(ids) == 20 * 3 * 2
    assert sorted(t.id for t in finished) == sorted(ids)
    assert workflow.most_running == 5


class Progress(SilentObserver):
    def __init__(self):
        self.told = []
        self.messages = []

    def on_message(self, text):
        self.messages.append(text)

    def on_progress(self, num_done, note=""):
        self.told.append((num_done, note))


async def test_a_run_in_which_nothing_works_stops_in_spite_of_backup_tasks():
    workflow, progress = FakeWorkflow(lambda _: None), Progress()
    scheduler = schedule(workflow, batch_size=2, num_backup_tasks=3, observer=progress)
    with pytest.raises(RolloutFailedError, match="all 10 trajectories failed") as caught:
        await scheduler.next_batch(1)
    await scheduler.close()
    assert len(workflow.started) == 10
    assert progress.told[0] == (0, "")
    assert progress.told[-1][1] == "3 groups replaced"
    assert {t.group_id for t in caught.value.trajectories if t.replaced_by} == {
        "000001.000", "000001.001", "000001.002",
    }  # fmt: skip


async def test_generation_runs_ahead_of_training_exactly_as_far_as_allowed():
    workflow = FakeWorkflow()
    scheduler = schedule(workflow, last_step=9, max_staleness=2)
    await scheduler.next_batch(1)
    await asyncio.sleep(0.02)
    # Version 0 may sample for the steps that train versions 0, 1 and 2.
    assert {step for step, _, _ in workflow.started} == {1, 2, 3}
    scheduler.set_policy_version(1)
    await asyncio.sleep(0.02)
    assert {step for step, _, _ in workflow.started} == {1, 2, 3, 4}
    await scheduler.close()


async def test_a_task_that_is_set_aside_is_named_with_its_failure():
    progress = Progress()
    workflow = FakeWorkflow(lambda attempt: None if attempt.task.task_id == "0" else 1.0)
    scheduler = schedule(workflow, batch_size=9, observer=progress, max_failed_groups=2)
    for step in range(1, 4):
        # Each step has every task.
        assert len(await scheduler.next_batch(step)) == (16 if step == 3 else 18)
        scheduler.set_policy_version(step)
        assert len(progress.messages) == (step > 1)
    await scheduler.close()
    [message] = progress.messages
    assert message.startswith("task 0 (its row, counted from 0) is set aside")
    assert "at the boundary 'agent' with KeyError: 'x'" in message


async def test_a_step_whose_tasks_were_all_set_aside_ends_the_run():
    # One task a step, of nine.
    scheduler = schedule(FakeWorkflow(), batch_size=1, last_step=99, max_failed_groups=1)
    planner = scheduler.planner
    planner._failing["4"] = 1
    with pytest.raises(RunError, match=r"step \d: all of its tasks were set aside"):  # noqa: PT012
        for step in range(1, 10):
            await scheduler.next_batch(step)
            scheduler.set_policy_version(step)
    assert planner.num_set_aside == 1
    await scheduler.close()


async def test_a_batch_whose_weights_never_come_is_refused_instead_of_awaited():
    scheduler = schedule(FakeWorkflow())
    await scheduler.next_batch(1)
    with pytest.raises(RunError, match="step 2 is made with policy version 1"):
        await scheduler.next_batch(2)
    scheduler.set_policy_version(1)
    assert len(await scheduler.next_batch(2)) == 6
    with pytest.raises(RunError, match="the next one is 3"):
        await scheduler.next_batch(2)
    await scheduler.close()


async def test_close_cancels_what_runs_and_wakes_who_waits():
    workflow = FakeWorkflow(lambda _: "hang")
    scheduler = schedule(workflow, max_concurrent=4)
    waiting = asyncio.create_task(scheduler.next_batch(1))
    await asyncio.sleep(0.02)
    assert scheduler.pool.num_running == 4
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
    scheduler = schedule(workflow)
    with pytest.raises(RolloutFailedError, match=message) as caught:
        await scheduler.next_batch(1)
    assert len(caught.value.trajectories) == 6
    await scheduler.close()
    # One trajectory that is as it should be is enough to go on.
    workflow.survivors = ("000001.001/1",)
    scheduler = schedule(workflow)
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
    scheduler = schedule(workflow, max_concurrent=2, on_finished=on_finished)
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
