"""Functions on the official SDKs: each protocol, async and blocking, whole and streamed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time

import pytest

from agentrl_cli.records import Boundary, InteractionStatus
from builders.calculator_agent import calculate
from builders.plain_agent import build_async_agent, build_blocking_agent

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
    "additionalProperties": False,
}
EXPRESSIONS = ('{"expression": "20 + 22"}', '{"expression": "21 * 2"}')


class ChatLoop:
    """A tool loop over chat completions, whoever makes the calls."""

    names = ("chat.completions.create", "chat.completions.stream", "get_final_completion")
    client_name = "client"
    prefix = "chatcmpl-"

    def __init__(self, question):
        self.messages = [{"role": "user", "content": question}]

    def request(self):
        function = {"name": "calculate", "parameters": PARAMETERS, "strict": True}
        return {
            "messages": self.messages, "tools": [{"type": "function", "function": function}]
        }  # fmt: skip

    def take(self, reply):
        """The answer, or None: the tools' results were added."""
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = calculate(**json.loads(call.function.arguments))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return None if message.tool_calls else message.content


class ResponsesLoop:
    """The same over responses."""

    names = ("responses.create", "responses.stream", "get_final_response")
    client_name = "client"
    prefix = "resp_"

    def __init__(self, question):
        self.items = [{"role": "user", "content": question}]

    def request(self):
        tool = {"type": "function", "name": "calculate", "parameters": PARAMETERS, "strict": True}
        return {"input": self.items, "tools": [tool]}

    def take(self, reply):
        calls = [item for item in reply.output if item.type == "function_call"]
        self.items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            for item in reply.output
        ]
        for call in calls:
            result = calculate(**json.loads(call.arguments))
            self.items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": result}
            )
        return None if calls else reply.output_text


class MessagesLoop:
    """The same over messages."""

    names = ("messages.create", "messages.stream", "get_final_message")
    client_name = "anthropic_client"
    prefix = "msg_"

    def __init__(self, question):
        self.messages = [{"role": "user", "content": question}]

    def request(self):
        tool = {"name": "calculate", "input_schema": PARAMETERS}
        return {"messages": self.messages, "tools": [tool], "max_tokens": 64}

    def take(self, reply):
        uses = [block for block in reply.content if block.type == "tool_use"]
        self.messages.append({"role": "assistant", "content": reply.content})
        if not uses:
            return "".join(block.text for block in reply.content)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": calculate(**use.input)}
            for use in uses
        ]
        self.messages.append({"role": "user", "content": results})
        return None


def find(client, path):
    for name in path.split("."):
        client = getattr(client, name)
    return client


def make_agent(loop_type, colour, delivery):
    """An agent function of the wanted colour, with a client of the loop's kind."""
    create, stream, final = loop_type.names

    async def ask(loop, client, model):
        if delivery == "whole":
            return await find(client, create)(model=model, **loop.request())
        async with find(client, stream)(model=model, **loop.request()) as events:
            return await getattr(events, final)()

    def ask_blocking(loop, client, model):
        if delivery == "whole":
            return find(client, create)(model=model, **loop.request())
        with find(client, stream)(model=model, **loop.request()) as events:
            return getattr(events, final)()

    async def solve(data, client, model):
        loop = loop_type(data["question"])
        while (answer := loop.take(await ask(loop, client, model))) is None:
            pass
        return answer

    def solve_blocking(data, client, model):
        loop = loop_type(data["question"])
        while (answer := loop.take(ask_blocking(loop, client, model))) is None:
            pass
        return answer

    async def solve_anthropic(data, anthropic_client, model):
        return await solve(data, anthropic_client, model)

    def solve_anthropic_blocking(data, anthropic_client, model):
        return solve_blocking(data, anthropic_client, model)

    if loop_type.client_name == "anthropic_client":
        return solve_anthropic if colour == "async" else solve_anthropic_blocking
    return solve if colour == "async" else solve_blocking


@pytest.mark.parametrize("delivery", ["whole", "streamed"])
@pytest.mark.parametrize("colour", ["async", "blocking"])
@pytest.mark.parametrize(
    "loop_type",
    [ChatLoop, ResponsesLoop, pytest.param(MessagesLoop, marks=pytest.mark.anthropic)],
    ids=["chat", "responses", "messages"],
)
async def test_every_cell_trains_what_was_sampled(
    play_agent, tool_call, loop_type, colour, delivery
):
    if loop_type is MessagesLoop:
        pytest.importorskip("anthropic")
    first, second = (tool_call("calculate", e) for e in EXPRESSIONS)
    agent = make_agent(loop_type, colour, delivery)
    played = await play_agent(
        lambda: agent, f"Let me see.\n{first}", first, f"{first}\n{second}", "It is 42."
    )
    trajectory = played.trajectory
    assert trajectory.failure is None
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "It is 42.")
    assert (trajectory.num_turns, trajectory.num_tool_calls) == (4, 4)
    assert all(i.extends_parent for i in trajectory.interactions[1:])
    assert played.breaks == []
    assert played.prompts[-1].count("<tool_response>\n42\n</tool_response>") == 4
    assert all(i.id.startswith(loop_type.prefix) for i in trajectory.interactions)


@pytest.mark.parametrize(
    "change",
    [
        lambda i: {"completion_ids": i.completion_ids[::-1]},
        lambda i: {"rollout_logprobs": (0.0, *i.rollout_logprobs[1:])},
        lambda i: {"versions": tuple(v + 1 for v in i.versions)},
        lambda i: {"prompt_ids": i.prompt_ids[1:]},
        lambda _: {"temperature": 0.0},
        lambda _: {"status": InteractionStatus.FAILED},
    ],
)
async def test_the_check_of_every_cell_finds_what_was_not_sampled(
    play_agent, check_tensors, change
):
    played = await play_agent(build_async_agent, "It is 42.")
    [interaction] = played.trajectory.interactions
    wrong = dataclasses.replace(interaction, **change(interaction))
    with pytest.raises(AssertionError):
        check_tensors(
            [dataclasses.replace(played.trajectory, interactions=(wrong,))], played.engine
        )


@pytest.mark.parametrize("builder", [build_async_agent, build_blocking_agent])
async def test_the_example_agents_work(play_agent, tool_call, builder):
    call = tool_call("calculate", EXPRESSIONS[0])
    wrong = tool_call("calculate", '{"formula": "1"}')
    played = await play_agent(builder, wrong, call, "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)
    assert "error: calculate() got an unexpected" in played.prompts[1]
    assert played.breaks == []


async def test_a_blocking_agent_rewards_its_own_calls(play_agent):
    def solve(data, client, model):
        asked = [{"role": "user", "content": data["question"]}]
        first = client.chat.completions.create(model=model, messages=asked)
        second = client.chat.completions.create(model=model, messages=asked)
        client.set_reward(first.id, 0.25)
        client.set_final_reward(0.75)
        assert [i.id for i in client.interactions] == [first.id, second.id]

    played = await play_agent(lambda: solve, "41", "42")
    assert played.trajectory.failure is None
    assert [i.reward for i in played.trajectory.interactions] == [0.25, 0.75]


async def test_a_blocking_agent_that_passes_its_deadline_is_cut_off(play_agent):
    """Its thread goes on, but its call ends, and no later one is answered."""
    ended = threading.Event()
    errors = []

    def solve(data, client, model):
        for _ in range(2):
            try:
                client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "?"}]
                )
            except Exception as error:
                errors.append(error.__cause__ or error)
                time.sleep(1.0)
        ended.set()

    async def never(prompt):
        await asyncio.sleep(60)

    played = await play_agent(lambda: solve, never, "too late", timeout_seconds=0.3)
    failure = played.trajectory.failure
    assert failure.boundary is Boundary.TIMEOUT
    assert [i.status for i in played.trajectory.interactions] == [InteractionStatus.CANCELLED]
    assert await asyncio.to_thread(ended.wait, 30)
    # The call in flight is refused for its time, or cut off; the next one finds nobody.
    first, second = (type(error).__name__ for error in errors)
    assert first in ("BadRequestError", "BlockingCallError")
    assert second == "BlockingCallError"
    assert played.engine.sampled == []


async def test_sixteen_blocking_agents_wait_at_the_same_time(
    play_agent, open_client, scripted_engine
):
    from agentrl_cli.agents.building import AgentSource
    from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
    from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
    from agentrl_cli.rollout.dataset import build_eval_tasks
    from agentrl_cli.rollout.scheduler import run_tasks

    gate = threading.Barrier(16, timeout=20)

    def solve(data, client, model):
        gate.wait()
        asked = [{"role": "user", "content": f"Say {data['number']}."}]
        reply = client.chat.completions.create(model=model, messages=asked)
        gate.wait()
        return float(reply.choices[0].message.content == data["number"])

    engine = scripted_engine(lambda prompt: prompt.split("Say ")[1].split(".")[0])
    workflow = AgentRolloutWorkflow(
        {None: AgentSource(lambda: solve, {}, "k")},
        reward=None,
        gconfig=GenerationConfig(),
        rollout=RolloutConfig(),
        open_client=open_client,
    )
    rows = [{"number": str(n)} for n in range(16)]
    trajectories = await run_tasks(
        workflow, engine, build_eval_tasks(rows), n_samples=1, max_concurrent=16
    )
    assert [t.failure for t in trajectories] == [None] * 16
    assert [t.reward for t in trajectories] == [1.0] * 16
