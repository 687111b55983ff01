"""Agents as their frameworks' documentation writes them: without a key, and without agentrl."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.agents.agent_environment import building_environment, reward_environment
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import BuilderError, RolloutFailedError
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
    "ignore:create_react_agent has been moved",
    "ignore:The model .claude",
    # Of the SDK's own Runner.run_sync, which keeps an event loop for each thread.
    "ignore:asynchronous generator:ResourceWarning",
    "ignore:unclosed:ResourceWarning",
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
            code = source if ENDING in source else source + ENDING
            (tmp_path / f"stock_{name}.py").write_text(code)
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
                "rollout": {"subprocess": {"max_processes": 3}, "timeout_seconds": 200} | rollout,
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
                # What frameworks left open is reported here, and not in another test.
                gc.collect()

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


@pytest.mark.slow
async def test_a_client_that_a_framework_keeps_serves_the_next_trajectory_too(run: Any) -> None:
    """LangChain keeps one for each address; its connections are of an event loop that has ended."""
    pytest.importorskip("langchain_openai")
    check(
        await run(
            {"langgraph": LANGGRAPH}, 3, agent_mode="subprocess", subprocess={"max_processes": 1}
        )
    )


CAMEL_GLOBAL = """
from camel.agents import ChatAgent
from camel.models import ModelFactory
from camel.types import ModelPlatformType, ModelType

model = ModelFactory.create(
    model_platform=ModelPlatformType.OPENAI, model_type=ModelType.GPT_4O_MINI
)
agent = ChatAgent("You are a helpful assistant.", model=model)

def solve(data):
    return agent.step(data["question"]).msgs[0].content
"""
ASK = """
import os
import threading
import urllib.request
from openai import OpenAI

client = OpenAI()

def ask(data):
    messages = [{"role": "user", "content": data["question"]}]
    completion = client.chat.completions.create(model="gpt-4o-mini", messages=messages)
    return completion.choices[0].message.content
"""
NOT_INLINE = {
    "a_history_for_all": OFFLINE_CAMEL + CAMEL_GLOBAL,
    "a_thread_without_context": ASK
    + """
def solve(data):
    found = []
    thread = threading.Thread(target=lambda: found.append(ask(data)))
    thread.start()
    thread.join()
    return found[0]
""",
    "another_http_library": ASK
    + """
def solve(data):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/models"
    urllib.request.urlopen(urllib.request.Request(url, headers=headers)).close()
    return ask(data)
""",
    "a_blocking_call_in_async_code": ASK
    + """
async def solve(data):
    return ask(data)
""",
    "a_thread_that_async_code_waits_for": ASK
    + """
import contextvars

async def solve(data):
    found = []
    work = contextvars.copy_context().run
    thread = threading.Thread(target=work, args=(lambda: found.append(ask(data)),))
    thread.start()
    thread.join()
    return found[0]
""",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", NOT_INLINE)
async def test_what_cannot_run_inline_runs_in_workers_and_says_so(
    run: Any,
    keep_camel: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    monkeypatch.setattr("agentrl_cli.agents.agent_environment._LOOP_SECONDS", 0.5)
    check(await run({name: NOT_INLINE[name]}, 3), num_turns=1)
    assert caplog.text.count("cannot run inline") == 1
    assert "rollout.agent_mode: subprocess" in caplog.text


JUDGE = """
def judge(completions):
    return float(bool(ask({"question": completions})))
"""
ASYNC_JUDGE = """
async def judge(completions):
    return float(bool(ask({"question": completions})))
"""


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (ASK + "ask({'question': 'at import'})\n", "imported or built"),
        (ASK + "solve = ask\n" + ENDING + JUDGE, "client that was made for the agent"),
        (ASK + "solve = ask\n" + ENDING + ASYNC_JUDGE, "client that was made for the agent"),
    ],
)
async def test_a_call_without_a_trajectory_says_so_and_asks_for_no_key(
    run: Any, source: str, told: str
) -> None:
    try:
        [trajectory] = await run({"agent": source}, 1)
        message = trajectory.failure.message
    except BuilderError as error:
        message = str(error)
    assert told in message
    assert "API_KEY" not in message


async def test_the_environment_of_others_stays_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a judge's")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "a person's")
    with building_environment():
        assert os.environ["OPENAI_API_KEY"] != "a judge's"
        assert os.getenv("OPENAI_BASE_URL") == os.environ["OPENAI_API_BASE"]
        assert "ANTHROPIC_AUTH_TOKEN" not in {**os.environ}
        # As tutorials begin.
        os.environ["OPENAI_API_KEY"] = "sk-..."
        with reward_environment():
            assert os.environ["OPENAI_API_KEY"] == "a judge's"
            assert "OPENAI_BASE_URL" not in os.environ
    assert os.environ["OPENAI_API_KEY"] == "a judge's"
    assert os.environ["ANTHROPIC_AUTH_TOKEN"] == "a person's"
