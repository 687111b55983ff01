"""Agents on Anthropic's real SDK: every token accounted for, and trained on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("anthropic")

from anthropic import AsyncAnthropic

from agentrl_cli import build_anthropic_client
from agentrl_cli.models.calculator_tasks import CALCULATE_TOOL, SYSTEM_PROMPT
from agentrl_cli.records import StopReason
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.credit import build_sequences
from builders.anthropic_agent import build_anthropic_agent, build_blocking_anthropic_agent

pytestmark = pytest.mark.anthropic

ROOT = Path(__file__).parents[3]
ROW = {"question": "What is 20 plus 22?", "answer": "42"}


@pytest.mark.parametrize("builder", [build_anthropic_agent, build_blocking_anthropic_agent])
async def test_a_tool_loop_is_one_sequence(play_agent, tool_call, builder):
    calls = "\n".join(tool_call("calculate", f'{{"expression": "{n} + 1"}}') for n in (1, 2))
    played = await play_agent(
        builder, f"Let me see.\n{calls}", tool_call("calculate", '{"expression": "20+22"}'), "42"
    )
    trajectory = played.trajectory
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "42")
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (3, 3)
    assert "<tool_response>\n2\n</tool_response>" in played.prompts[1]
    assert "<tool_response>\n42\n</tool_response>" in played.prompts[2]
    assert played.prefix_mismatches == []
    assert [i.turn_return for i in trajectory.interactions] == [1.0] * 3
    [sequence] = build_sequences(trajectory.interactions, "concat")
    assert sum(sequence.loss_mask) == trajectory.num_completion_tokens


async def test_the_prompt_is_that_of_the_demonstrations(play_agent, chat_tokenizer):
    """The built-in model knows no other."""
    played = await play_agent(build_anthropic_agent, "42", row=ROW)
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": ROW["question"]},
    ]
    assert played.prompts == [
        chat_tokenizer.apply_chat_template(
            messages, tools=[CALCULATE_TOOL], add_generation_prompt=True, tokenize=False
        )
    ]


async def test_a_loop_without_end_meets_the_budget(play_agent, tool_call):
    async def loop(data, anthropic_client, model):
        while True:
            await anthropic_client.messages.create(
                model=model, max_tokens=9, messages=[{"role": "user", "content": "Again."}]
            )

    played = await play_agent(lambda: loop, *["a"] * 9, max_turns=3)
    assert played.trajectory.failure is None, "it is judged by what it has said"
    assert played.trajectory.stop_reason is StopReason.MAX_TURNS
    assert played.trajectory.num_turns == 3


async def test_a_client_of_the_agents_own_may_be_closed_by_it(play_agent):
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

    trajectory = (await play_agent(lambda: own, "4", "2", "0", "0")).trajectory
    assert trajectory.failure is None
    assert trajectory.final_answer == "4200"
    assert trajectory.num_turns == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_shipped_config_trains_both_agents(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    def train(builder: str) -> RunFolder:
        run_python(
            *("-m", "agentrl_cli", "train", "--config", "configs/anthropic-calculator.yaml"),
            *(f"trial_name={builder}", f"agent_builder_path=builders.anthropic_agent.{builder}"),
            *("train.total_steps=2", "train_dataset.batch_size=4", "gconfig.n_samples=4"),
            *("valid_dataset.limit=16", f"output_dir={tmp_path}"),
            OMP_NUM_THREADS="1",
        )
        return RunFolder.open(tmp_path / "anthropic-calculator" / builder)

    # Two at once: most of either is imports, which take one core.
    with ThreadPoolExecutor(2) as pool:
        builders = ("build_anthropic_agent", "build_blocking_anthropic_agent")
        for folder in pool.map(train, builders):
            check_run(folder)


def check_run(folder: RunFolder) -> None:
    """Every token that the model sampled is trained on once."""
    assert [line["num_trajectories"] for line in folder.read_metrics()] == [16, 16]
    for step in (1, 2):
        for trajectory in folder.read_trajectories(step):
            assert trajectory.failure is None
            assert {i.id[:4] for i in trajectory.interactions} == {"msg_"}
            assert {i.mismatch_cause for i in trajectory.interactions} == {None}
            sequences = build_sequences(trajectory.interactions, "concat")
            assert sum(sum(s.loss_mask) for s in sequences) == trajectory.num_completion_tokens
