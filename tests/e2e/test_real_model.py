"""Every framework's example on the built-in model: what is exported is what was sampled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.log import SilentObserver
from agentrl_cli.models.calculator_tasks import build_rows
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workers.worker_pool import WorkerAgents
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:Parameter description is missing:UserWarning"),
]

STREAMED = {"delivery": "streamed"}


def make_cell(package: str, builder: str, mode: str = "inline", **kwargs: Any) -> Any:
    """A case that is skipped where the framework is not installed."""
    marker = {"agents": "openai_agents", "": "slow"}.get(package, package)
    name = "-".join((builder.rsplit(".", 1)[1], mode, *kwargs.values()))
    marks = getattr(pytest.mark, marker)
    return pytest.param(package, builder, mode, kwargs, id=name, marks=marks)


OPENAI_AGENTS = "builders.openai_features.build_calculator_run"
GRAPH = "builders.langgraph_agent.build_calculator_graph"
#: Every framework and protocol once or twice, with deliveries and modes in turns: tests/e2e/matrix
#: has all of them, with replies of a script.
CELLS = [
    make_cell("agents", OPENAI_AGENTS, api="chat"),
    make_cell("agents", OPENAI_AGENTS, "subprocess", api="responses", **STREAMED),
    make_cell("camel", "builders.camel_agent.build_chat_agent"),
    make_cell("camel", "builders.camel_agent.build_chat_agent", "subprocess", **STREAMED),
    make_cell("langgraph", GRAPH, api="responses"),
    make_cell("langgraph", GRAPH, "subprocess", api="chat", **STREAMED),
    make_cell("anthropic", "builders.anthropic_agent.build_anthropic_agent"),
    make_cell("anthropic", "builders.anthropic_agent.build_blocking_anthropic_agent", "subprocess"),
    make_cell("", "builders.plain_agent.build_async_agent"),
    make_cell("", "builders.plain_agent.build_blocking_agent", "subprocess"),
]


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The built-in model and its tokenizer, made in a minute where no cache has it."""
    from agentrl_cli.models.builtin_models import resolve_model_folder
    from agentrl_cli.models.model_files import load_tokenizer
    from agentrl_cli.models.pretrained import load_model

    folder = resolve_model_folder("builtin:calculator", SilentObserver())
    assert Path(folder).is_dir()
    return load_model(folder, "float32", "cpu"), load_tokenizer(folder)


@pytest.fixture
async def engine(calculator: tuple[Any, Any], recording_engine: Any) -> AsyncIterator[Any]:
    """The embedded engine with the built-in model."""
    from agentrl_cli.engine.embedded.embedded_engine import EmbeddedEngine

    config = EngineConfig(max_model_len=512, max_num_seqs=32, num_threads=1)
    engine = EmbeddedEngine(*calculator, config, model_name="calculator")
    yield recording_engine(engine)
    await engine.close()


@pytest.mark.parametrize(("package", "builder", "mode", "kwargs"), CELLS)
async def test_real_conversations_export_what_was_sampled(
    engine: Any, calculator: tuple[Any, Any], check_tensors: Any,
    package: str, builder: str, mode: str, kwargs: dict[str, Any],
) -> None:  # fmt: skip
    if package:
        pytest.importorskip(package)
    config = load_config(
        ROOT / "configs" / "quickstart.yaml",
        [
            f"agent_builder_path={builder}",
            f"agent_builder_kwargs={kwargs}",
            f"rollout.agent_mode={mode}",
            "seed=7",
            "rollout.subprocess.max_processes=2",
        ],
    )
    gateway = Gateway(engine, calculator[1])

    def open_client(_: Any, sampling: Any, budget: Any) -> TrackingClient:
        session = gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=gateway, session=session)

    with contextlib.ExitStack() as stack:
        workers = None
        if mode == "subprocess":
            workers = await asyncio.to_thread(WorkerAgents, config)
            stack.callback(workers.close)
        workflow = build_workflow(config, calculator[1], workers=workers, open_client=open_client)
        stack.callback(workflow.close)
        trajectories = await run_tasks(
            workflow, engine, build_eval_tasks(build_rows("test")[:16]),
            n_samples=2, max_concurrent=32,
        )  # fmt: skip
    await gateway.close()
    assert {t.failure for t in trajectories} == {None}
    assert len(trajectories) == 32
    # The model calls its tool in about a third of the conversations, and then is nearly
    # always right.
    with_tool = [t for t in trajectories if t.num_tool_calls]
    assert len(with_tool) >= 4
    assert sum(t.reward or 0.0 for t in with_tool) >= len(with_tool) / 2
    assert [
        i.mismatch_cause for t in trajectories for i in t.interactions if i.mismatch_cause
    ] == []
    assert all(i.extends_parent for t in with_tool for i in t.interactions[1:])
    check_tensors(trajectories, engine)
