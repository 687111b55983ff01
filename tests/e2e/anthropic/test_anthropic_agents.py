"""Agents on Anthropic's real SDK: every token accounted for, and trained on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("anthropic")

from anthropic import AsyncAnthropic

from agentrl_cli import build_anthropic_client
from agentrl_cli.agents.building import AgentSource
from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.models.calculator_prompt import CALCULATE_TOOL, SYSTEM_PROMPT
from agentrl_cli.records import Boundary
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.sequences import build_sequences
from builders.anthropic_agent import build_anthropic_agent, build_blocking_anthropic_agent
from rewards.exact_answer import exact_answer_reward_fn

pytestmark = pytest.mark.anthropic

ROOT = Path(__file__).parents[3]
ROW = {"question": "What is 20 plus 22?", "answer": "42"}


async def reward_fn(completions, answer):
    return exact_answer_reward_fn(completions, answer)


@pytest.fixture
def play(open_client, scripted_engine):
    """Runs one trajectory of a builder's agent whose model replies as given."""

    async def run(builder, *replies, row=ROW, **rollout):
        engine = scripted_engine(replies)
        workflow = AgentRolloutWorkflow(
            {None: AgentSource(builder, {}, "agent_builder_path")},
            reward=AsyncRewardWrapper(reward_fn),
            gconfig=GenerationConfig(),
            rollout=RolloutConfig(**rollout),
            open_client=open_client,
        )
        task = Task(task_id="0", row=row, group_id="000001.000")
        trajectory = await workflow.arun_trajectory(engine, Attempt(task=task, step=1))
        left = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}
        assert left - {"Server.serve"} == {asyncio.current_task().get_coro().__qualname__}
        return trajectory, engine

    return run


@pytest.mark.parametrize("builder", [build_anthropic_agent, build_blocking_anthropic_agent])
async def test_a_tool_loop_is_one_sequence(play, tool_call, builder):
    calls = "\n".join(tool_call("calculate", f'{{"expression": "{n} + 1"}}') for n in (1, 2))
    trajectory, engine = await play(
        builder, f"Let me see.\n{calls}", tool_call("calculate", '{"expression": "20+22"}'), "42"
    )
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "42")
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (3, 3)
    assert "<tool_response>\n2\n</tool_response>" in engine.prompts[1]
    assert "<tool_response>\n42\n</tool_response>" in engine.prompts[2]
    assert [i.break_cause for i in trajectory.interactions] == [None] * 3
    assert [i.turn_return for i in trajectory.interactions] == [1.0] * 3
    [sequence] = build_sequences(trajectory.interactions, "concat")
    assert sum(sequence.loss_mask) == trajectory.num_completion_tokens


async def test_the_prompt_is_that_of_the_demonstrations(play, chat_tokenizer):
    """The built-in model knows no other."""
    _, engine = await play(build_anthropic_agent, "42")
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": ROW["question"]},
    ]
    assert engine.prompts == [
        chat_tokenizer.apply_chat_template(
            messages, tools=[CALCULATE_TOOL], add_generation_prompt=True, tokenize=False
        )
    ]


async def test_a_loop_without_end_meets_the_budget(play, tool_call):
    async def loop(data, anthropic_client, model):
        while True:
            await anthropic_client.messages.create(
                model=model, max_tokens=9, messages=[{"role": "user", "content": "Again."}]
            )

    trajectory, _ = await play(lambda: loop, *["a"] * 9, max_turns=3)
    assert trajectory.failure.boundary is Boundary.BUDGET
    assert trajectory.num_turns == 3


async def test_a_client_of_the_agents_own_may_be_closed_by_it(play):
    """In process by http_client, by the socket, and out of the tracking client."""

    async def own(data, base_url, api_key, http_client, client, model):
        answers = []
        url = base_url.removesuffix("/v1")
        for sdk in (
            AsyncAnthropic(base_url=url, api_key=api_key, http_client=http_client),
            AsyncAnthropic(base_url=url, api_key=api_key),
            build_anthropic_client(client),
            build_anthropic_client(client),
        ):
            async with sdk:
                reply = await sdk.messages.create(
                    model=model, max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
                )
                answers.append(reply.content[0].text)
        return "".join(answers)

    trajectory, _ = await play(lambda: own, "4", "2", "0", "0")
    assert trajectory.failure is None
    assert trajectory.final_answer == "4200"
    assert trajectory.num_turns == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("builder", ["build_anthropic_agent", "build_blocking_anthropic_agent"])
def test_the_shipped_config_trains(tmp_path: Path, builder: str) -> None:
    cache = os.environ.get("AGENTRL_CACHE") or str(tmp_path / "cache")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "agentrl_cli", "train"),
            *("--config", "configs/anthropic-calculator.yaml", f"output_dir={tmp_path}"),
            f"agent_builder_path=builders.anthropic_agent.{builder}",
            *("train.total_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4"),
            "valid_dataset.limit=16",
        ],
        cwd=ROOT,
        env={**os.environ, "AGENTRL_CACHE": cache, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert result.returncode == 0, result.stdout
    folder = RunFolder.open(tmp_path / "anthropic-calculator" / "t0")
    assert [line["num_trajectories"] for line in folder.read_metrics()] == [16, 16]
    for step in (1, 2):
        for trajectory in folder.read_trajectories(step):
            assert trajectory.failure is None
            assert {i.id[:4] for i in trajectory.interactions} == {"msg_"}
            assert {i.break_cause for i in trajectory.interactions} == {None}
            sequences = build_sequences(trajectory.interactions, "concat")
            assert sum(sum(s.loss_mask) for s in sequences) == trajectory.num_completion_tokens
