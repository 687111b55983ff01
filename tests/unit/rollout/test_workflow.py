"""Workflows of one's own: what they return becomes a trajectory, or a failure with a reason."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.errors import DatasetError, RewardSignatureError
from agentrl_cli.records import Boundary
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import AgentWorkflow, Attempt, RolloutWorkflow, find_style
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.credit import TokenSequence
from agentrl_cli.tracking.session import Budget, Sampling

ATTEMPT = Attempt(
    task=Task(task_id="0", row={"questions": ["a", "b"]}, group_id="000001.000"), step=1
)


class TwoClients(RolloutWorkflow):
    """Two conversations, one after the other, each on a client of its own."""

    def __init__(self, open_client, style="concat", error=None):
        self.open_client, self.style, self.error = open_client, style, error

    async def arun_episode(self, engine, data):
        exported = {}
        for number, question in enumerate(data["questions"]):
            client = self.open_client(engine, Sampling(), Budget())
            try:
                messages = [{"role": "user", "content": question}]
                for _ in range(2):
                    reply = await client.chat.completions.create(model="m", messages=messages)
                    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                    messages.append({"role": "user", "content": "go on"})
                client.set_final_reward(number + 0.5)
                client.apply_reward_discount(1.0)
                exported |= client.export_interactions(self.style)
            finally:
                await client.close()
        if self.error is not None:
            raise self.error
        return exported


@pytest.mark.parametrize("style", ["concat", "individual"])
async def test_every_interaction_is_kept_once(open_client, scripted_engine, style):
    engine = scripted_engine(["1", "2", "3", "4"])
    trajectory = await TwoClients(open_client, style).arun_trajectory(engine, ATTEMPT)
    assert trajectory.failure is None
    assert [i.reply["content"] for i in trajectory.interactions] == ["1", "2", "3", "4"]
    assert [i.reward for i in trajectory.interactions] == [None, 0.5, None, 1.5]
    assert (trajectory.reward, trajectory.final_answer) == (1.5, "4")
    assert trajectory.task == {"questions": ["a", "b"]}
    # What is trained is what was exported, whatever rollout.export_style says.
    assert trajectory.export_style == style


@pytest.mark.parametrize("order", ["export first", "discount last", "discount both"])
async def test_credit_flows_by_time_across_clients(scripted_engine, chat_tokenizer, order):
    """Clients made as the documentation says take the configuration's sampling and budget."""

    class TwoRoles(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            async def ask(question):
                client = TrackingClient(engine=engine, tokenizer=chat_tokenizer)
                messages = [{"role": "user", "content": question}]
                for _ in range(2):
                    reply = await client.chat.completions.create(model="m", messages=messages)
                    messages.append(reply.choices[0].message.model_dump(exclude_none=True))
                    messages.append({"role": "user", "content": "go on"})
                return client

            planner = await ask("plan")
            exported = planner.export_interactions()
            writer = await ask("write")
            writer.set_final_reward(1.0)
            if order != "export first":
                writer.apply_reward_discount(0.5)
            if order == "discount both":
                planner.apply_reward_discount(0.5)
                exported = planner.export_interactions()
            assert writer.session.sampling.max_tokens == 7
            assert writer.session.budget.max_turns == 5
            return exported | writer.export_interactions()

    workflow = TwoRoles()
    workflow.use(RolloutConfig(max_turns=5, turn_discount=0.5), GenerationConfig(max_tokens=7))
    trajectory = await workflow.arun_trajectory(scripted_engine(["1", "2", "3", "4"]), ATTEMPT)
    assert trajectory.failure is None, trajectory.failure
    assert [i.turn_return for i in trajectory.interactions] == [0.125, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("sets_reward", [False, True])
async def test_an_episode_without_a_reward_is_judged_by_the_reward_function(
    scripted_engine, chat_tokenizer, sets_reward
):
    class AskTwice(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            client = TrackingClient(engine=engine, tokenizer=chat_tokenizer)
            messages = [{"role": "user", "content": data["question"]}]
            first = await client.chat.completions.create(model="m", messages=messages)
            messages.append(first.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "again"})
            await client.chat.completions.create(model="m", messages=messages)
            if sets_reward:
                client.set_reward(first.id, 0.25)
            # Before there is a reward it hands out nothing.
            client.apply_reward_discount(0.1)
            return client.export_interactions()

    async def judge(completions, messages, answer):
        assert len(messages) == 4
        return {"reward": float(completions == answer), "turns": 2}

    workflow = AskTwice()
    workflow.use(RolloutConfig(turn_discount=0.5), reward=AsyncRewardWrapper(judge))
    rows = [{"question": "q", "answer": "good"}]
    workflow.check_rows(rows, "train_dataset")
    with pytest.raises(RewardSignatureError, match="answer"):
        workflow.check_rows([{"question": "q"}], "train_dataset")
    attempt = replace(ATTEMPT, task=replace(ATTEMPT.task, row=rows[0]))
    trajectory = await workflow.arun_trajectory(scripted_engine(["bad", "good"]), attempt)
    assert trajectory.failure is None, trajectory.failure
    found = [(i.reward, i.turn_return) for i in trajectory.interactions]
    if sets_reward:
        assert (trajectory.reward, found) == (0.25, [(0.25, 0.25), (None, 0.0)])
    else:
        assert (trajectory.reward, found) == (1.0, [(None, 0.5), (1.0, 1.0)])
        assert trajectory.reward_parts == {"turns": 2.0}


async def test_a_reward_function_that_raises_after_an_episode_is_the_rewards_failure(
    scripted_engine, chat_tokenizer
):
    class Ask(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            client = TrackingClient(engine=engine, tokenizer=chat_tokenizer)
            message = {"role": "user", "content": "q"}
            await client.chat.completions.create(model="m", messages=[message])
            return client.export_interactions()

    async def judge(completions):
        raise KeyError("gold")

    workflow = Ask()
    workflow.use(RolloutConfig(), reward=AsyncRewardWrapper(judge))
    trajectory = await workflow.arun_trajectory(scripted_engine(["1"]), ATTEMPT)
    assert trajectory.failure.boundary is Boundary.REWARD
    assert (trajectory.reward, len(trajectory.interactions)) == (None, 1)


async def test_an_unknown_style_names_the_nearest(scripted_engine, open_client):
    client = open_client(scripted_engine([]), Sampling(), Budget())
    with pytest.raises(ValueError, match="'indivdual'; did you mean 'individual'"):
        client.export_interactions("indivdual")
    await client.close()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "returned float. Allowed: the dict of client.export_interactions"),
        ({"id": 1.0}, "returned float under 'id'"),
        (None, "is there a return?"),
    ],
)
async def test_another_result_is_a_failure_that_says_what_is_allowed(
    scripted_engine, result, message
):
    class Wrong(RolloutWorkflow):
        async def arun_episode(self, engine, data):
            return result

    trajectory = await Wrong().arun_trajectory(scripted_engine([]), ATTEMPT)
    assert trajectory.failure.boundary is Boundary.AGENT
    assert message in trajectory.failure.message


def test_both_export_styles_at_once_are_refused():
    assert find_style([]) is None
    with pytest.raises(ValueError, match="both export styles"):
        find_style([TokenSequence((), "concat"), TokenSequence((), "individual")])


async def test_exceptions_deadlines_and_mistakes(open_client, scripted_engine):
    engine = scripted_engine(lambda _: "1")
    trajectory = await TwoClients(open_client, error=KeyError("x")).arun_trajectory(engine, ATTEMPT)
    assert (trajectory.failure.kind, trajectory.reward) == ("KeyError", None)

    class Slow(RolloutWorkflow):
        timeout_seconds = 0.05

        async def arun_episode(self, engine, data):
            await asyncio.sleep(60)

    trajectory = await Slow().arun_trajectory(engine, ATTEMPT)
    assert trajectory.failure.boundary is Boundary.TIMEOUT
    with pytest.raises(DatasetError):
        await TwoClients(open_client, error=DatasetError("x")).arun_trajectory(engine, ATTEMPT)


def test_both_bases_insist_on_their_method():
    for base in (RolloutWorkflow, AgentWorkflow):
        with pytest.raises(TypeError, match="abstract"):
            base()


async def test_a_retry_goes_on_from_the_turns_of_all_clients(open_client, scripted_engine):
    workflow = TwoClients(open_client, error=RuntimeError("the tool broke"))
    failed = await workflow.arun_trajectory(scripted_engine(["1", "2", "3", "4"]), ATTEMPT)
    assert failed.failure is not None
    workflow.error = None
    workflow.use(RolloutConfig(retry_from="finished_turns"))
    attempt = replace(ATTEMPT, earlier=failed.interactions[:3])
    trajectory = await workflow.arun_trajectory(scripted_engine(["other"]), attempt)
    assert trajectory.failure is None
    replies = [i.reply["content"] for i in trajectory.interactions]
    assert replies == ["1", "2", "3", "other"]
