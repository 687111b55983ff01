"""Trajectories on the embedded engine with a real, tiny model: versions, budgets, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.config.experiment import EngineConfig, GenerationConfig, RolloutConfig
from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.dataset import TaskStream, build_eval_tasks
from agentrl_cli.rollout.scheduler import RolloutScheduler, run_tasks
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import build_sequences
from agentrl_cli.tracking.gateway import Gateway

ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(6)]
NUM_TURNS = 3


@pytest.fixture
async def engine(build_tiny_model, tiny_tokenizer):
    config = EngineConfig(max_model_len=512, max_num_seqs=8, num_threads=1)
    engine = EmbeddedEngine(build_tiny_model(), tiny_tokenizer, config, model_name="tiny")
    yield engine
    await engine.close()


@pytest.fixture
async def make_workflow(engine, tiny_tokenizer):
    gateway = Gateway(engine, tiny_tokenizer)

    async def agent(data, client, model):
        messages = [{"role": "user", "content": data["question"]}]
        for _ in range(NUM_TURNS):
            reply = await client.chat.completions.create(model=model, messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Go on."})
        return float(len(reply.choices[0].message.content or ""))

    def open_client(engine, sampling, budget):
        session = gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=gateway, session=session)

    def build(*, max_tokens=8, seed=None, **rollout):
        return AgentRolloutWorkflow(
            {None: AgentSource(lambda: agent, {}, "agent_builder_path")},
            reward=None,
            gconfig=GenerationConfig(max_tokens=max_tokens),
            rollout=RolloutConfig(**rollout),
            open_client=open_client,
            seed=seed,
        )

    yield build
    await gateway.close()


def schedule(workflow, engine, *, max_staleness=2, batch_size, last_step):
    planner = StepPlanner(
        TaskStream(ROWS, batch_size=batch_size, shuffle=True, seed=1),
        n_samples=2,
        max_staleness=max_staleness,
        max_trajectory_age=max_staleness,
        first_step=1,
        last_step=last_step,
    )
    # Room for two batches: were it for one, and its trajectories equally long, none of the next
    # would begin before the publication.
    scheduler = RolloutScheduler(workflow, engine, planner, max_concurrent=8)
    scheduler.set_policy_version(0)
    return scheduler


async def test_versions_stay_within_the_allowed_staleness(engine, make_workflow, build_tiny_model):
    """Weights are published after every step, while the next steps are being sampled."""
    staleness, last_step = 1, 5
    scheduler = schedule(
        make_workflow(), engine, max_staleness=staleness, batch_size=2, last_step=last_step
    )
    seen = set()
    try:
        for step in range(1, last_step + 1):
            for trajectory in await scheduler.next_batch(step):
                assert trajectory.failure is None
                assert trajectory.num_turns == NUM_TURNS
                versions = {v for i in trajectory.interactions for v in i.versions}
                assert all(0 <= (step - 1) - v <= staleness for v in versions), (step, versions)
                seen |= {(step - 1) - v for v in versions}
                sequences = build_sequences(trajectory.interactions, "concat")
                num_trained = sum(sum(s.loss_mask) for s in sequences)
                assert num_trained == trajectory.num_completion_tokens
            weights = build_tiny_model(seed=step).state_dict()
            await engine.publish_weights(step, weights)
            scheduler.set_policy_version(step)
    finally:
        await scheduler.close()
    # The overlap was real: some tokens were sampled one version early.
    assert seen == {0, 1}


async def test_a_seeded_trajectory_is_the_same_whatever_runs_beside_it(engine, make_workflow):
    workflow = make_workflow(seed=5)
    tasks = build_eval_tasks(ROWS)
    together = await run_tasks(workflow, engine, tasks, n_samples=2, max_concurrent=8)
    alone = await run_tasks(workflow, engine, tasks[2:3], n_samples=2, max_concurrent=1)
    first, second = ([i.completion_ids for i in t.interactions] for t in alone)
    assert [first, second] == [[i.completion_ids for i in t.interactions] for t in together[4:6]]
    assert first != second


async def test_cancelled_rollouts_free_the_engine(engine, make_workflow):
    workflow = make_workflow(max_tokens=400)
    scheduler = schedule(workflow, engine, batch_size=4, last_step=3)
    waiting = asyncio.create_task(scheduler.next_batch(1))
    await asyncio.sleep(0.5)
    before = scheduler.pool.num_running
    await scheduler.close()
    await asyncio.gather(waiting, return_exceptions=True)
    assert before > 0
    assert scheduler.pool.num_running == 0
    quick = make_workflow(max_tokens=1)
    trajectories = await asyncio.wait_for(
        run_tasks(quick, engine, build_eval_tasks(ROWS[:2]), n_samples=1, max_concurrent=2), 30
    )
    assert [t.failure for t in trajectories] == [None, None]
