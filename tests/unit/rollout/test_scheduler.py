"""Order, concurrency and staleness of trajectories; failures of whole batches."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.errors import DatasetError, RolloutFailedError, RunError, StoreError
from agentrl_cli.records import Boundary, Failure, Interaction
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import TaskStream, build_eval_tasks
from agentrl_cli.rollout.scheduler import RolloutScheduler, run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow

ROWS = [{"i": i} for i in range(7)]


class FakeWorkflow(RolloutWorkflow):
    """Notes when trajectories start and end; sleeps and fails as it is told."""

    def __init__(self, seed=0, failing=lambda _attempt: False, error=None):
        self.random = random.Random(seed)
        self.failing = failing
        self.error = error
        self.calling = lambda _attempt: True
        self.scoring = lambda _attempt: True
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
            if self.error is not None and self.failing(attempt):
                raise self.error
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        failure = Failure(boundary=Boundary.AGENT, kind="KeyError", message="'x'", traceback="tb")
        failed = self.failing(attempt)
        return attempt.begin_trajectory(
            reward=1.0 if self.scoring(attempt) and not failed else None,
            failure=failure if failed else None,
            interactions=(Interaction(id="call"),) if self.calling(attempt) else (),
        )


class HangingWorkflow(FakeWorkflow):
    async def arun_trajectory(self, engine, attempt):
        self.started.append((attempt.step, attempt.id, self.version))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


def _schedule(workflow, *, batch_size=3, n_samples=2, last_step=4, on_finished=None, **rollout):
    stream = TaskStream(ROWS, batch_size=batch_size, shuffle=True, seed=3)
    return RolloutScheduler(
        workflow,
        None,
        stream,
        rollout=RolloutConfig(**rollout),
        n_samples=n_samples,
        first_step=1,
        last_step=last_step,
        on_finished=on_finished,
    )


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch_size=st.integers(1, 5),
    n_samples=st.integers(1, 4),
    last_step=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    max_concurrent=st.integers(1, 9),
)
def test_staleness_order_and_concurrency(
    seed, batch_size, n_samples, last_step, max_staleness, max_concurrent
):
    failing_random = random.Random(seed)
    workflow = FakeWorkflow(seed, failing=lambda _: failing_random.random() < 0.3)
    stream = TaskStream(ROWS, batch_size=batch_size, shuffle=True, seed=3)
    kept = []

    async def train():
        scheduler = _schedule(
            workflow,
            batch_size=batch_size,
            n_samples=n_samples,
            last_step=last_step,
            max_staleness=max_staleness,
            max_concurrent=max_concurrent,
            on_finished=kept.append,
        )
        for step in range(1, last_step + 1):
            try:
                batch = await scheduler.next_batch(step)
            except RolloutFailedError:
                batch = None
            if batch is not None:
                wanted = [(t.group_id, i) for t in stream.batch(step) for i in range(n_samples)]
                assert [(t.group_id, t.sample_index) for t in batch] == wanted
                assert {t.step for t in batch} == {step}
            assert sum(t.step == step for t in kept) == batch_size * n_samples
            for _ in range(workflow.random.randrange(20)):
                await asyncio.sleep(0)
            workflow.version = step
            scheduler.set_policy_version(step)
        await scheduler.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(train())
    steps = [step for step, _, _ in workflow.started]
    assert steps == sorted(steps)
    assert len({id_ for _, id_, _ in workflow.started}) == last_step * batch_size * n_samples
    assert sorted(t.id for t in kept) == sorted(id_ for _, id_, _ in workflow.started)
    # Step k trains version k - 1, so its tokens may be max_staleness older and no more.
    assert all((step - 1) - version <= max_staleness for step, _, version in workflow.started)
    assert workflow.most_running <= max_concurrent


async def test_generation_runs_ahead_of_training_exactly_as_far_as_allowed():
    workflow = FakeWorkflow()
    scheduler = _schedule(workflow, last_step=9, max_staleness=2)
    await scheduler.next_batch(1)
    await asyncio.sleep(0.02)
    # Version 0 may sample for the steps that train versions 0, 1 and 2.
    assert {step for step, _, _ in workflow.started} == {1, 2, 3}
    scheduler.set_policy_version(1)
    await asyncio.sleep(0.02)
    assert {step for step, _, _ in workflow.started} == {1, 2, 3, 4}
    await scheduler.close()


async def test_a_slow_trajectory_delays_its_step_and_is_not_dropped():
    release = asyncio.Event()

    class OneSlow(FakeWorkflow):
        async def arun_trajectory(self, engine, attempt):
            if attempt.step == 1 and attempt.sample_index == 1:
                await release.wait()
            return await super().arun_trajectory(engine, attempt)

    kept = []
    scheduler = _schedule(OneSlow(), batch_size=1, on_finished=kept.append)
    waiting = asyncio.create_task(scheduler.next_batch(1))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    assert [(t.step, t.sample_index) for t in kept if t.step == 1] == [(1, 0)]
    release.set()
    assert [t.sample_index for t in await waiting] == [0, 1]
    await scheduler.close()


async def test_a_batch_whose_weights_never_come_is_refused_instead_of_awaited():
    scheduler = _schedule(FakeWorkflow(), max_staleness=0)
    await scheduler.next_batch(1)
    with pytest.raises(RunError, match="step 2 needs policy version 1 or newer"):
        await scheduler.next_batch(2)
    scheduler.set_policy_version(1)
    assert len(await scheduler.next_batch(2)) == 6
    with pytest.raises(RunError, match="the next one is 3 of 1 to 4"):
        await scheduler.next_batch(2)
    await scheduler.close()


async def test_close_cancels_what_runs_and_wakes_who_waits():
    workflow = HangingWorkflow()
    scheduler = _schedule(workflow, max_concurrent=4)
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


async def test_an_identical_failure_of_a_whole_batch_stops_with_advice():
    scheduler = _schedule(FakeWorkflow(failing=lambda attempt: attempt.step == 1))
    with pytest.raises(RolloutFailedError) as caught:
        await scheduler.next_batch(1)
    message = str(caught.value)
    assert "all 6 trajectories failed" in message
    assert "'agent' with KeyError: 'x'" in message
    assert "| tb" in message
    assert "Run the agent on one task" in message
    await scheduler.close()


async def test_a_batch_whose_agents_call_no_model_stops_the_run():
    """As when they make clients of their own, which speak to another model."""
    workflow = FakeWorkflow(failing=lambda attempt: attempt.id.endswith("/1"))
    workflow.calling = lambda _attempt: False
    with pytest.raises(
        RolloutFailedError, match=r"step 1: none of 6 traj.*called the model"
    ) as caught:
        await _schedule(workflow).next_batch(1)
    assert len(caught.value.trajectories) == 6
    workflow.calling = lambda attempt: attempt.sample_index == 1
    assert len(await _schedule(workflow).next_batch(1)) == 6


async def test_a_batch_that_nobody_scores_stops_the_run():
    """As when a reward function forgets to return."""
    workflow = FakeWorkflow(failing=lambda attempt: attempt.sample_index == 0)
    workflow.scoring = lambda _attempt: False
    with pytest.raises(
        RolloutFailedError,
        match=r"step 1: none of 6 trajectories has a reward, and 3 of them ended without.*return a",
    ):
        await _schedule(workflow).next_batch(1)
    workflow.scoring = lambda attempt: attempt.id.endswith("/1")
    assert len(await _schedule(workflow).next_batch(1)) == 6


async def test_a_batch_with_one_survivor_goes_on():
    scheduler = _schedule(FakeWorkflow(failing=lambda attempt: attempt.sample_index == 0))
    batch = await scheduler.next_batch(1)
    assert [t.failure is None for t in batch] == [False, True] * 3
    await scheduler.close()


@pytest.mark.parametrize("error", [DatasetError("row 3"), ValueError("bug"), SystemExit(1)])
async def test_what_is_not_data_reaches_the_trainer(error):
    workflow = FakeWorkflow(error=error, failing=lambda a: a.sample_index == 1)
    scheduler = _schedule(workflow, max_concurrent=2)
    with pytest.raises(type(error)):
        await scheduler.next_batch(1)
    assert len(workflow.started) < 6
    await scheduler.close()
    assert len(asyncio.all_tasks()) == 1


async def test_a_full_disk_stops_the_run():
    def full(trajectory):
        raise StoreError("no space left")

    scheduler = _schedule(FakeWorkflow(), on_finished=full)
    with pytest.raises(StoreError):
        await scheduler.next_batch(1)
    await scheduler.close()


def test_works_from_a_trainers_thread():
    workflow = FakeWorkflow()
    with BackgroundLoop() as loop:
        scheduler = _schedule(workflow, max_staleness=0)
        for step in range(1, 5):
            assert len(loop.run(scheduler.next_batch(step), 5)) == 6
            scheduler.set_policy_version(step)
        loop.run(scheduler.close(), 5)


async def test_run_tasks_keeps_order_and_limits_concurrency():
    workflow = FakeWorkflow(1)
    kept = []
    tasks = build_eval_tasks(ROWS)
    trajectories = await run_tasks(
        workflow, None, tasks, n_samples=2, max_concurrent=3, on_finished=kept.append
    )
    assert [t.id for t in trajectories] == [f"{t.group_id}/{i}" for t in tasks for i in range(2)]
    assert len(kept) == 14
    assert workflow.most_running == 3
    assert len(asyncio.all_tasks()) == 1


async def test_run_tasks_ends_on_mistakes_cancellation_and_total_failure():
    tasks = build_eval_tasks(ROWS)
    with pytest.raises(DatasetError):
        await run_tasks(
            FakeWorkflow(error=DatasetError("x"), failing=lambda _: True),
            None, tasks, n_samples=1, max_concurrent=2,
        )  # fmt: skip
    with pytest.raises(RolloutFailedError, match="evaluation after step 4"):
        await run_tasks(
            FakeWorkflow(failing=lambda _: True), None, tasks,
            n_samples=1, max_concurrent=2, step=4,
        )  # fmt: skip
    hanging = HangingWorkflow()
    task = asyncio.create_task(run_tasks(hanging, None, tasks, n_samples=1, max_concurrent=2))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hanging.num_cancelled == 2
    assert len(asyncio.all_tasks()) == 1
