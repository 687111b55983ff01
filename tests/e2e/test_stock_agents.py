"""Agents as their frameworks' documentation writes them: no key, no base_url, nothing of agentrl."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow_building import build_workflow, open_workers
from agentrl_cli.tracking.credit import build_sequences

NUM_TURNS = 12

OPENAI_SDK = """
from openai import OpenAI

client = OpenAI()

def solve(data):
    messages = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"{data['question']} turn {turn}"})
        completion = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
        messages.append(completion.choices[0].message)
    return completion.choices[0].message.content
"""
ANTHROPIC = """
import anthropic

client = anthropic.Anthropic()

def solve(data):
    messages = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"{data['question']} turn {turn}"})
        message = client.messages.create(
            model="claude-sonnet-4-5", max_tokens=1024, messages=messages
        )
        messages.append({"role": "assistant", "content": message.content})
    return message.content[0].text
"""
OPENAI_AGENTS = """
from agents import Agent, Runner

agent = Agent(name="Assistant", instructions="Reply very concisely.")

def solve(data):
    items = []
    for turn in range(12):
        items.append({"role": "user", "content": f"{data['question']} turn {turn}"})
        result = Runner.run_sync(agent, items)
        items = result.to_input_list()
    return result.final_output
"""
LANGGRAPH = """
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

def get_weather(city: str) -> str:
    "Get weather for a given city."
    return f"It's always sunny in {city}!"

agent = create_react_agent(ChatOpenAI(model="gpt-4o-mini"), [get_weather], prompt="Be brief.")

async def solve(data):
    state = {"messages": []}
    for turn in range(12):
        asked = {"role": "user", "content": f"{data['question']} turn {turn}"}
        state = await agent.ainvoke({"messages": [*state["messages"], asked]})
    return state["messages"][-1].content
"""
CAMEL = """
from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.types import ModelPlatformType, ModelType

def solve(data):
    model = ModelFactory.create(
        model_platform=ModelPlatformType.OPENAI, model_type=ModelType.GPT_4O_MINI
    )
    agent = ChatAgent("You are a helpful assistant.", model=model)
    for turn in range(12):
        response = agent.step(f"{data['question']} turn {turn}")
    return response.msgs[0].content
"""
#: CAMEL downloads a file to count tokens; tests may have no network.
OFFLINE_CAMEL = """
from camel.utils import OpenAITokenCounter as Counter

Counter.__init__ = lambda self, model: None
Counter.count_tokens_from_messages = lambda self, messages: 0
"""
AGENTS = {
    "openai_sdk": OPENAI_SDK,
    "anthropic": ANTHROPIC,
    "openai_agents": OPENAI_AGENTS,
    "langgraph": LANGGRAPH,
    "camel": OFFLINE_CAMEL + CAMEL,
}
#: The reward stands beside the agent and its client, as in one file of a user's.
ENDING = """
def build():
    return solve

def judge(completions, question):
    return float(question in completions)
"""

pytestmark = pytest.mark.filterwarnings(
    "ignore:create_react_agent has been moved", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture
def keep_camel(monkeypatch: pytest.MonkeyPatch) -> None:
    """CAMEL as it was, after the test."""
    counter = pytest.importorskip("camel.utils").OpenAITokenCounter
    for name in ("__init__", "count_tokens_from_messages"):
        monkeypatch.setattr(counter, name, getattr(counter, name))


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_client: Any, scripted_engine: Any
) -> Any:
    """Runs agents side by side, ``num_tasks`` tasks each, without any key in the environment."""
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)

    async def run_agents(
        sources: dict[str, str], num_tasks: int, **rollout: Any
    ) -> list[Trajectory]:
        for name, source in sources.items():
            (tmp_path / f"stock_{name}.py").write_text(source + ENDING)
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "stock",
                "model": {"path": "builtin:calculator"},
                "train_dataset": {"path": "rows.jsonl"},
                "agents": {
                    name: {"agent_builder_path": f"{tmp_path}/stock_{name}.py:build"}
                    for name in sources
                },
                "reward_fn_path": f"{tmp_path}/stock_{next(iter(sources))}.py:judge",
                "rollout": {"num_workers": 3, "timeout_seconds": 200, **rollout},
            }
        )
        rows = [
            {"question": f"task-{number}-{name}", "agent_name": name}
            for number in range(num_tasks)
            for name in sources
        ]

        def reply(prompt: str) -> str:
            return "seen " + " ".join(sorted(set(re.findall(r"task-\d+-\w+", prompt))))

        with open_workers(config) as workers:
            workflow = build_workflow(config, None, open_client=open_client, workers=workers)
            workflow.check_rows(rows, "train_dataset")
            tasks = build_eval_tasks(rows)
            options = {"n_samples": 1, "max_concurrent": 16}
            try:
                return await run_tasks(workflow, scripted_engine(reply), tasks, **options)
            except RolloutFailedError as error:
                return list(error.trajectories)
            finally:
                workflow.close()

    return run_agents


def check(trajectories: list[Trajectory], num_turns: int = NUM_TURNS) -> None:
    """Each has its own task's conversation, whole, as one sample."""
    for trajectory in trajectories:
        question = trajectory.task["question"]
        assert trajectory.failure is None, trajectory.failure
        assert (trajectory.final_answer, trajectory.reward) == (f"seen {question}", 1.0)
        assert len(build_sequences(trajectory.interactions, "concat")) == 1, question
        assert trajectory.num_turns == num_turns


@pytest.mark.slow
@pytest.mark.parametrize("agent_mode", ["inline", "subprocess"])
async def test_five_stock_agents_side_by_side(
    run: Any, keep_camel: None, agent_mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("agents", "langgraph", "langchain_openai", "anthropic"):
        pytest.importorskip(name)
    trajectories = await run(AGENTS, 3, agent_mode=agent_mode)
    assert len(trajectories) == 15
    check(trajectories)
    assert "cannot run inline" not in caplog.text
