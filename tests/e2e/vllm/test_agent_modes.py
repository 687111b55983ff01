"""Agents in workers and programs elsewhere on a real vLLM: what is exported is what it sampled."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import WeightTransfer
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.rollout_workers.rollout_pool import RemoteWorkflow, RolloutWorkers
from agentrl_cli.launch.servers.server_group import ServerGroup, open_router
from agentrl_cli.log import SilentObserver
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.external.external_workflow import ExternalListener
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow_building import build_workflow, open_workers
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

AGENT = Path(__file__).with_name("forced_agent.py")
ROWS = [{"question": f"What is {n} + {n}?"} for n in range(3)]
NUM_SAMPLES = 2


def build_transfer(config: Any, servers: RunningServers) -> WeightTransfer:
    return build_weight_transfer(
        config,
        model_folder=config.model.path,
        kind=servers.run.weight_transfer,
        tied_names={},
    )


@pytest.fixture
async def engine(
    untied_server_group: ServerGroup,
    untied_folder: Path,
    make_vllm_config: Callable[..., ExperimentConfig],
    recording_engine: Any,
    open_server: Callable[..., Any],
) -> AsyncIterator[Any]:
    """The engine of a run on the session's server, and what it sampled."""
    config = make_vllm_config(untied_folder)
    [endpoint] = untied_server_group.endpoints
    servers = RunningServers(run=untied_server_group.run, endpoints=(endpoint,))
    router = await open_router(config, servers, build_transfer(config, servers), 0)
    yield recording_engine(router)
    await router.close()
    await open_server(endpoint).forget_version()


@pytest.fixture
async def open_client(engine: Any, chat_tokenizer: Any) -> AsyncIterator[Callable[..., Any]]:
    gateway = Gateway(engine, chat_tokenizer)

    def open_one(_: Any, sampling: Any, budget: Any) -> TrackingClient:
        session = gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=gateway, session=session)

    yield open_one
    num_left = gateway.num_open_sessions
    await gateway.close()
    assert num_left == 0


def check(trajectories: Sequence[Trajectory]) -> None:
    """Each is one unbroken conversation of three turns, and of calls that were cut off."""
    assert [t.failure for t in trajectories] == [None] * len(ROWS) * NUM_SAMPLES
    for trajectory in trajectories:
        assert trajectory.reward == 5.0
        assert trajectory.num_tool_calls >= 2
        turns = {i.id: i for i in trajectory.interactions}
        assert [i.mismatch_cause for i in turns.values() if i.mismatch_cause is not None] == []
        answer = trajectory.interactions[-1]
        second = turns.pop(answer.parent_id)
        first = turns.pop(second.parent_id)
        assert (first.parent_id, second.extends_parent, answer.extends_parent) == (None, True, True)
        del turns[answer.id]
        assert {i.finish_reason for i in turns.values()} <= {"length"}


async def test_agents_in_workers(
    engine: Any,
    open_client: Any,
    untied_folder: Path,
    make_vllm_config: Callable[..., ExperimentConfig],
    check_tensors: Callable[..., None],
) -> None:
    config = make_vllm_config(
        untied_folder,
        agent_builder_path=f"{AGENT}:build",
        rollout={"agent_mode": "subprocess", "subprocess": {"max_processes": 2}},
    )
    with open_workers(config) as workers:
        workflow = build_workflow(config, None, open_client=open_client, workers=workers)
        trajectories = await run_tasks(
            workflow, engine, build_eval_tasks(ROWS), n_samples=NUM_SAMPLES, max_concurrent=4
        )
        workflow.close()
    check(trajectories)
    check_tensors(trajectories, engine)


@pytest.mark.usefixtures("engine")
async def test_agents_in_rollout_workers(
    untied_server_group: ServerGroup,
    untied_folder: Path,
    make_vllm_config: Callable[..., ExperimentConfig],
    chat_tokenizer: Any,
    tmp_path: Path,
) -> None:
    config = make_vllm_config(untied_folder, agent_builder_path=f"{AGENT}:build")
    endpoints = tuple(untied_server_group.endpoints)
    servers = RunningServers(run=untied_server_group.run, endpoints=endpoints)

    def make() -> list[Trajectory]:
        with ExitStack() as stack:
            background = stack.enter_context(BackgroundLoop())
            workers = RolloutWorkers(config, 2, ["train"], SilentObserver())
            stack.callback(workers.close)
            workers.start(background, servers, config.model.path, chat_tokenizer, tmp_path)
            opening = open_router(config, servers, build_transfer(config, servers), 0)
            router = background.run(opening, 120)
            stack.callback(lambda: background.run(router.close(), 20))
            workers.attach(router)
            workflow = build_workflow(config, chat_tokenizer)
            stack.callback(workflow.close)
            rolling = run_tasks(
                RemoteWorkflow(workers, "train", workflow),
                router,
                build_eval_tasks(ROWS),
                n_samples=NUM_SAMPLES,
                max_concurrent=4,
            )
            return background.run(rolling, 240)

    trajectories = await asyncio.to_thread(make)
    check(trajectories)
    versions = {v for t in trajectories for i in t.interactions for v in i.versions}
    assert versions == {0}


async def run_program(shown: str) -> None:
    """A process that has what was shown to the user, and no more."""
    exports = dict(re.findall(r"export (\w+)=(\S+)", shown))
    assert set(exports) == {"AGENTRL_URL", "AGENTRL_API_KEY"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(AGENT),
        env=os.environ | exports, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, errors.decode()


async def test_programs_elsewhere(
    engine: Any,
    open_client: Any,
    untied_folder: Path,
    make_vllm_config: Callable[..., ExperimentConfig],
    check_tensors: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AGENTRL_API_KEY", raising=False)
    config = make_vllm_config(
        untied_folder, agent_builder_path=None, rollout={"agent_mode": "external"}
    )
    shown: asyncio.Queue[str] = asyncio.Queue()
    access = ExternalListener(config.rollout, shown.put_nowait)
    workflow = build_workflow(config, None, open_client=open_client, external=access)
    making = asyncio.create_task(
        run_tasks(workflow, engine, build_eval_tasks(ROWS), n_samples=NUM_SAMPLES, max_concurrent=4)
    )
    try:
        door = await asyncio.wait_for(shown.get(), 30)
        for _ in range(len(ROWS) * NUM_SAMPLES // 2):
            async with asyncio.TaskGroup() as programs:
                programs.create_task(run_program(door))
                programs.create_task(run_program(door))
        trajectories = await asyncio.wait_for(making, 60)
    finally:
        making.cancel()
        await asyncio.wait([making])
        workflow.close()
    check(trajectories)
    check_tensors(trajectories, engine)
