"""Trajectories of plain Python agents through the real gateway: rewards, failures, budgets."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import numpy as np
import openai
import pydantic
import pytest

from agentrl_cli.agents.agent_building import AgentSource
from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import (
    BuilderError,
    ContextLengthError,
    DatasetError,
    EngineError,
    RewardSignatureError,
)
from agentrl_cli.records import Boundary, InteractionStatus, StopReason
from agentrl_cli.rollout.agent_workflow import AgentRolloutWorkflow
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.scores import compute_score

ROW = {"question": "What is 2 + 2?", "answer": "4"}


@pytest.fixture
def make_workflow(open_client):
    def build(agent, reward_fn=None, *, seed=None, gconfig=None, per_trajectory=None, **rollout):
        builder = per_trajectory or (lambda: agent)
        return AgentRolloutWorkflow(
            {None: AgentSource(builder, {}, "agent_builder_path")},
            reward=AsyncRewardWrapper(reward_fn, timeout_seconds=0.5) if reward_fn else None,
            gconfig=gconfig or GenerationConfig(),
            rollout=RolloutConfig(**rollout),
            open_client=open_client,
            seed=seed,
        )

    return build


@pytest.fixture
def run(make_workflow, scripted_engine):
    """The trajectory of one agent: ``run(agent, reward_fn, replies=["4"], max_turns=2)``."""

    async def run_one(agent, reward_fn=None, *, replies=("4",), **options):
        engine = scripted_engine(replies)
        return await make_workflow(agent, reward_fn, **options).arun_trajectory(engine, _attempt())

    return run_one


def _attempt(row=ROW, sample_index=0):
    task = Task(task_id="5", row=row, group_id="000003.001")
    return Attempt(task=task, sample_index=sample_index, step=3)


async def _ask(client, *contents):
    """One conversation of several turns; the last reply's text."""
    return (await _talk(client, *contents))[-1].choices[0].message.content


async def _talk(client, *contents):
    messages, replies = [], []
    for content in contents:
        messages.append({"role": "user", "content": content})
        replies.append(await client.chat.completions.create(model="m", messages=messages))
        messages.append(replies[-1].choices[0].message.model_dump(exclude_none=True))
    return replies


async def solve(data, client):
    return await _ask(client, data["question"])


async def fail_if_asked():
    raise AssertionError("must not be asked")


async def reply_late(prompt):
    await asyncio.sleep(60)


async def test_text_goes_to_the_reward_function_and_the_record_is_complete(run):
    async def reward_fn(completions, answer, prompt, messages, prompt_ids, completion_ids):
        assert prompt == ROW["question"]
        assert [m["role"] for m in messages] == ["user", "assistant"]
        assert prompt_ids
        assert completion_ids
        return {"reward": float(completions == answer), "length": len(completions)}

    trajectory = await run(solve, reward_fn)
    assert trajectory.failure is None
    assert (trajectory.id, trajectory.task_id, trajectory.task) == ("000003.001/0", "5", ROW)
    assert (trajectory.reward, trajectory.final_answer) == (1.0, "4")
    assert trajectory.reward_parts == {"length": 1.0}
    (interaction,) = trajectory.interactions
    assert (interaction.reward, interaction.turn_return) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("returned", "reward"), [(1, 1.0), (np.float32(0.5), 0.5), (float("nan"), None)]
)
async def test_an_agents_own_reward_goes_before_the_reward_function(run, returned, reward):
    async def agent(data, client):
        await solve(data, client)
        return returned

    trajectory = await run(agent, fail_if_asked)
    assert trajectory.failure is None
    assert trajectory.reward == trajectory.interactions[0].reward == reward


async def test_none_asks_the_reward_function_about_the_last_reply(run):
    async def agent(data, client):
        await _ask(client, "one", "two")

    async def reward_fn(completions):
        return None if completions == "b" else 1.0

    trajectory = await run(agent, reward_fn, replies=["a", "b"])
    assert (trajectory.final_answer, trajectory.reward, trajectory.failure) == ("b", None, None)


async def test_rewards_by_interaction_are_discounted_down_the_tree(run):
    async def agent(data, client):
        first, second = await _talk(client, "hi", "so?")
        return {first.id: 0.5, second.id: 1}

    trajectory = await run(agent, replies=["a", "b"], turn_discount=0.5)
    assert [i.reward for i in trajectory.interactions] == [0.5, 1.0]
    assert [i.turn_return for i in trajectory.interactions] == [1.0, 1.0]
    assert trajectory.reward == 1.0


@pytest.mark.parametrize("judge", [None, fail_if_asked])
async def test_rewards_set_through_the_client_are_kept(run, judge):
    async def agent(data, client):
        await solve(data, client)
        client.set_final_reward(0.75)

    trajectory = await run(agent, judge)
    assert (trajectory.reward, trajectory.failure) == (0.75, None)


async def test_a_reward_for_an_unknown_interaction_is_a_reward_failure(run):
    async def agent(data, client):
        (reply,) = await _talk(client, "x")
        return {reply.id: 1.0, "chatcmpl-nope": 1.0}

    trajectory = await run(agent)
    assert trajectory.failure.boundary is Boundary.REWARD
    assert "'chatcmpl-nope', which is no completed interaction" in trajectory.failure.message
    # Not half of the rewards: none.
    assert trajectory.reward is None
    assert trajectory.interactions[0].reward is None


async def raise_in_reward(completions):
    raise ZeroDivisionError("by nought")


async def hang_in_reward(completions):
    await asyncio.sleep(60)


async def praise(completions):
    return "good"


@pytest.mark.parametrize(
    ("reward_fn", "kind", "message"),
    [
        (None, "RewardError", "Set reward_fn_path"),
        (raise_in_reward, "ZeroDivisionError", "by nought"),
        (hang_in_reward, "RewardError", "did not finish"),
        (praise, "RewardError", "Allowed: a number"),
    ],
)
async def test_failures_of_the_reward_are_its_own(run, reward_fn, kind, message):
    trajectory = await run(solve, reward_fn)
    failure = trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.REWARD, kind)
    assert message in failure.message
    assert (trajectory.reward, trajectory.final_answer, trajectory.num_turns) == (None, "4", 1)


async def test_an_agents_exception_keeps_its_partial_interactions(run):
    async def agent(data, client):
        await solve(data, client)
        raise KeyError("state")

    trajectory = await run(agent)
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (Boundary.AGENT, "KeyError")
    assert 'raise KeyError("state")' in trajectory.failure.traceback
    header, first, *_ = trajectory.failure.traceback.splitlines()
    assert header.startswith("Traceback")
    assert __file__ in first, "it begins at the user's frames"
    assert (trajectory.num_turns, trajectory.reward) == (1, None)


@pytest.mark.parametrize("error", [EngineError("gpu lost"), ContextLengthError(5000, 4096)])
async def test_engine_errors_are_told_from_agent_errors(run, error):
    trajectory = await run(solve, replies=[error])
    failure = trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.ENGINE, type(error).__name__)
    assert trajectory.interactions[0].status is InteractionStatus.FAILED


async def test_an_engine_error_that_the_agent_survived_is_not_blamed(run):
    async def agent(data, client):
        try:
            await solve(data, client)
        except openai.APIError:
            await solve(data, client)
        raise IndexError("mine")

    trajectory = await run(agent, replies=[EngineError("once"), "4"])
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (Boundary.AGENT, "IndexError")


@pytest.mark.parametrize("way", ["raises", "returns", "nobody judges"])
@pytest.mark.parametrize(
    ("limits", "num_turns", "stop_reason"),
    [
        ({"max_turns": 2}, 2, StopReason.MAX_TURNS),
        ({"max_tokens_per_trajectory": 2}, 1, StopReason.MAX_TOKENS),
    ],
    ids=["turns", "tokens"],
)
async def test_what_a_budget_ended_is_judged_by_what_it_said(
    run, limits, num_turns, stop_reason, way
):
    async def agent(data, client):
        try:
            await _ask(client, *"abcdefg")
        except openai.BadRequestError:
            if way != "returns":
                raise

    async def reward_fn(completions):
        return 0.5 if completions == "4" else 0.0

    judge = None if way == "nobody judges" else reward_fn
    trajectory = await run(agent, judge, replies=lambda _: "4", **limits)
    assert (trajectory.num_turns, trajectory.stop_reason) == (num_turns, stop_reason)
    if judge is None:
        assert trajectory.failure.boundary is Boundary.BUDGET
        (key,) = limits
        assert f"rollout.{key} = 2" in trajectory.failure.message
    else:
        assert (trajectory.failure, trajectory.reward) == (None, 0.5)
        assert trajectory.interactions[-1].turn_return == 0.5


@pytest.mark.parametrize("returns", [False, True])
async def test_the_deadline_ends_a_trajectory_and_its_call(run, returns):
    """An agent may return what it has when its time is over."""
    replies = iter([lambda _: "a", reply_late])

    async def agent(data, client):
        try:
            await _ask(client, "one", "two")
        except openai.BadRequestError as error:
            if returns:
                return 0.25 if error.code == "budget_exceeded" else 0.0
            raise

    trajectory = await run(agent, replies=lambda prompt: next(replies)(prompt), timeout_seconds=1.0)
    assert trajectory.stop_reason is StopReason.MAX_SECONDS
    statuses = [i.status for i in trajectory.interactions]
    assert statuses == [InteractionStatus.COMPLETED, InteractionStatus.CANCELLED]
    assert len(asyncio.all_tasks()) == 1
    if returns:
        assert (trajectory.failure, trajectory.reward) == (None, 0.25)
    else:
        assert trajectory.failure.boundary is Boundary.TIMEOUT
        assert "rollout.timeout_seconds = 1 was reached" in trajectory.failure.message


TOOL = {
    "type": "function",
    "function": {
        "name": "double",
        "parameters": {
            "type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        },
    },
}  # fmt: skip


def dispatch(reply):
    for call in reply.tool_calls:
        {"double": lambda n: 2 / n}[call.function.name](**json.loads(call.function.arguments))


class Answer(pydantic.BaseModel):
    value: int


@pytest.mark.parametrize(
    ("said", "use", "is_policys"),
    [
        ('<tool_call>\n{"name": "half", "arguments": {}}\n</tool_call>', dispatch, True),
        ('<tool_call>\n{"name": "double", "arguments": {"m": 1}}\n</tool_call>', dispatch, True),
        ('<tool_call>\n{"name": "double", "arguments": {"n": 0}}\n</tool_call>', dispatch, False),
        ("no json", lambda reply: json.loads(reply.content), True),
        ('{"a": [1]}', lambda reply: Answer.model_validate_json(reply.content), True),
        ("It is 4.", lambda reply: int(reply.content), True),
        ("It is 4.", lambda _: json.loads(ROW["question"]), False),
        ("It is 4.", lambda _: ROW["state"], False),
    ],
    ids=["tool", "arguments", "tool bug", "json", "pydantic", "int", "row", "bug"],
)
async def test_whose_failure_it_is_tells_what_the_policy_said(run, said, use, is_policys):
    async def agent(data, client):
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        use(reply.choices[0].message)

    trajectory = await run(agent, fail_if_asked, replies=[said], policy_failure_reward=-0.5)
    assert trajectory.failure.boundary is Boundary.AGENT
    assert trajectory.is_policy_failure is is_policys
    reward = -0.5 if is_policys else None
    assert trajectory.reward == trajectory.interactions[0].turn_return == reward


@pytest.mark.parametrize(("kind", "required"), [([{}], None), (1, True)])
async def test_a_failure_beside_a_schema_that_is_none_is_a_failure(run, kind, required):
    """Nobody has checked what a framework makes of a tool's parameters."""
    parameters = {"properties": {"n": {"type": kind}}, "required": required}
    tool = {"type": "function", "function": {"name": "double", "parameters": parameters}}

    async def agent(data, client):
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model="m", messages=messages, tools=[tool])
        dispatch(reply.choices[0].message)

    said = '<tool_call>\n{"name": "double", "arguments": {"n": 0}}\n</tool_call>'
    trajectory = await run(agent, fail_if_asked, replies=[said])
    assert (trajectory.failure.kind, trajectory.is_policy_failure) == ("ZeroDivisionError", False)


@pytest.mark.parametrize(
    ("rewarded", "error", "reward"),
    [(0, "policy", 0.0), (1, "policy", 0.7), (1, "surroundings", None)],
)
async def test_a_failure_keeps_the_agents_own_reward_of_its_last_call(run, rewarded, error, reward):
    async def agent(data, client):
        replies = await _talk(client, "one", "two")
        client.set_reward(replies[rewarded].id, 0.7)
        json.loads(replies[-1].choices[0].message.content if error == "policy" else "{")

    trajectory = await run(agent, replies=["a", "b"])
    assert (trajectory.failure.cause, trajectory.reward) == (error, reward)
    assert trajectory.interactions[rewarded].reward == 0.7


async def test_a_context_that_was_used_up_is_a_budget(run):
    async def agent(data, client):
        await _ask(client, "one", "two")

    replies = ["4", ContextLengthError(5000, 4096)]
    trajectory = await run(agent, replies=replies)
    assert (trajectory.failure.boundary, trajectory.reward) == (Boundary.BUDGET, 0.0)
    assert trajectory.stop_reason is StopReason.MAX_MODEL_LEN
    trajectory = await run(agent, lambda completions: float(completions == "4"), replies=replies)
    assert (trajectory.failure, trajectory.reward) == (None, 1.0)


async def test_without_a_model_call_there_is_no_reward(run):
    async def agent(data):
        return 1.0

    trajectory = await run(agent)
    assert (trajectory.failure, trajectory.reward, compute_score(trajectory)) == (None, None, None)


async def test_sampling_defaults_and_seeds(make_workflow, scripted_engine):
    gconfig = GenerationConfig(max_tokens=7, temperature=0.5, top_p=0.9)
    engine = scripted_engine(lambda _: "4")
    seeded = make_workflow(solve, lambda: 1.0, gconfig=gconfig, seed=11)
    for index in (0, 1, 0):
        await seeded.arun_trajectory(engine, _attempt(sample_index=index))
    await make_workflow(solve, lambda: 1.0, gconfig=gconfig).arun_trajectory(engine, _attempt())
    first, second, again, free = engine.samplings
    assert (first.max_tokens, first.temperature, first.top_p) == (7, 0.5, 0.9)
    assert first == again
    assert first.seed != second.seed
    assert free == Sampling(max_tokens=7, temperature=0.5, top_p=0.9)


async def test_an_agent_may_write_into_its_row(run):
    async def agent(data, client):
        data["scratch"] = await _ask(client, data.pop("question"))
        return 1.0

    trajectory = await run(agent)
    assert trajectory.failure is None
    assert trajectory.task == ROW == {"question": "What is 2 + 2?", "answer": "4"}


async def test_a_builder_that_fails_later_is_data_but_a_wrong_return_is_not(
    make_workflow, scripted_engine
):
    calls = []

    def flaky(client):
        calls.append(1)
        if len(calls) == 2:
            raise OSError("flaky")
        return solve if len(calls) == 1 else None

    workflow = make_workflow(None, per_trajectory=flaky)
    trajectory = await workflow.arun_trajectory(scripted_engine([]), _attempt())
    assert (trajectory.failure.boundary, trajectory.failure.kind) == (Boundary.AGENT, "OSError")
    with pytest.raises(BuilderError, match="is there a return"):
        await workflow.arun_trajectory(scripted_engine([]), _attempt())


async def test_a_missing_reward_argument_stops_the_run(make_workflow, scripted_engine):
    async def reward_fn(completions, solution): ...

    workflow = make_workflow(solve, reward_fn)
    with pytest.raises(RewardSignatureError):
        await workflow.arun_trajectory(scripted_engine(["4"]), _attempt())


async def test_rows_choose_their_agent(open_client, scripted_engine):
    def make(name):
        async def agent(data, client):
            await _ask(client, name)
            return 1.0

        return AgentSource(lambda: agent, {}, f"agents.{name}")

    workflow = AgentRolloutWorkflow(
        {"first": make("first"), "second": make("second")},
        reward=None,
        gconfig=GenerationConfig(),
        rollout=RolloutConfig(),
        open_client=open_client,
    )
    engine = scripted_engine(lambda _: "4")
    trajectory = await workflow.arun_trajectory(engine, _attempt({"agent_name": "second"}))
    assert (trajectory.agent_name, trajectory.reward) == ("second", 1.0)
    assert "second" in engine.prompts[0]
    with pytest.raises(DatasetError, match=r"row 2 .*names the agent 'secund'.*'second'"):
        workflow.check_rows([{"agent_name": "first"}, {"agent_name": "secund"}], "train_dataset")
    with pytest.raises(DatasetError, match=r"row 1 .*has no agent_name"):
        workflow.check_rows([{"q": 1}], "train_dataset")


async def test_arun_episode_exports_and_raises(make_workflow, scripted_engine):
    async def agent(data, client):
        await _ask(client, "one", "two")
        return 1

    workflow = make_workflow(agent)
    exported = await workflow.arun_episode(scripted_engine(["a", "b"]), ROW)
    (item,) = exported.values()
    assert len(item.spans) == 2
    tensors = item.to_tensor_dict()
    assert math.isclose(tensors["rewards"].item(), 1.0)
    assert tensors["loss_mask"].sum() == sum(s.end - s.start for s in item.spans)
    with pytest.raises(openai.InternalServerError):
        await workflow.arun_episode(scripted_engine([EngineError("x")]), ROW)


@pytest.fixture
def make_again(make_workflow, scripted_engine):
    """Fails in the second of three turns' tools, and tries once more: both trajectories."""
    tool_answers = ["first", "second"]

    async def run_twice(later_replies, *, tool_answers_later=tool_answers, stream=False, **rollout):
        answers = []

        async def solve(data, client):
            messages = [{"role": "user", "content": data["question"]}]
            for number in range(3):
                if stream:
                    options = {"model": "m", "messages": messages}
                    async with client.chat.completions.stream(**options) as events:
                        async for _ in events:
                            pass
                        reply = await events.get_final_completion()
                else:
                    reply = await client.chat.completions.create(model="m", messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                if number < 2:
                    messages.append({"role": "user", "content": answers[number]})
            return messages[-1]["content"]

        workflow = make_workflow(solve, lambda **_: 1.0, **rollout)
        answers[:] = tool_answers[:1]
        first = await workflow.arun_trajectory(scripted_engine(["one", "two"]), _attempt())
        assert first.failure.kind == "IndexError"
        answers[:] = tool_answers_later
        engine = scripted_engine(later_replies)
        attempt = replace(_attempt(), earlier=first.interactions)
        return first, await workflow.arun_trajectory(engine, attempt)

    return run_twice


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_goes_on_from_the_finished_turns(make_again, stream):
    first, second = await make_again(["three"], stream=stream, retry_from="finished_turns")
    assert (second.failure, second.final_answer, second.reward) == (None, "three", 1.0)
    assert [i.extends_parent for i in second.interactions] == [False, True, True]
    for earlier, again in zip(first.interactions, second.interactions, strict=False):
        assert earlier.id != again.id
        for name in ("prompt_ids", "completion_ids", "rollout_logprobs", "versions", "reply"):
            assert list(getattr(again, name)) == list(getattr(earlier, name)), name
    # Not what the failed try was credited with.
    assert [i.reward for i in second.interactions] == [None, None, 1.0]


async def test_a_retry_asks_again_once_a_tool_answers_otherwise(make_again):
    _, second = await make_again(
        ["2", "3"], tool_answers_later=["other", "second"], retry_from="finished_turns"
    )
    assert [i.reply["content"] for i in second.interactions] == ["one", "2", "3"]


async def test_a_retry_starts_over_where_nothing_else_is_asked_for(make_again):
    _, second = await make_again(["1", "2", "3"])
    assert [i.reply["content"] for i in second.interactions] == ["1", "2", "3"]


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"top_p": 0.9}, {"stop": ["x"]}, {"max_tokens": 1}, {"logprobs": True}],
    ids=str,
)
async def test_a_turn_is_given_again_only_to_the_same_call(make_workflow, scripted_engine, change):
    options = {}

    async def solve(data, client):
        messages = [{"role": "user", "content": "hello"}]
        create = client.chat.completions.create
        reply = await create(model="m", messages=messages, **options)
        return reply.choices[0].message.content

    workflow = make_workflow(solve, lambda **_: 1.0, retry_from="finished_turns")
    first = await workflow.arun_trajectory(scripted_engine(["a long reply"]), _attempt())
    attempt = replace(_attempt(), earlier=first.interactions)
    assert (await workflow.arun_trajectory(scripted_engine([]), attempt)).failure is None
    options.update(change)
    if "logprobs" in change:
        options["top_logprobs"] = 2
    again = await workflow.arun_trajectory(scripted_engine(["other"]), attempt)
    assert again.final_answer == "other"
