"""Programs elsewhere: they take tasks over HTTP, talk to the model, give rewards and the end."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest

from agentrl_cli.config.experiment import GenerationConfig, RolloutConfig
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.errors import RunError, UserInputError
from agentrl_cli.records import Boundary, InteractionStatus, StopReason
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.external.external_workflow import ExternalListener, ExternalWorkflow
from agentrl_cli.rollout.rewards import AsyncRewardWrapper
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.tracking.session import Budget

ROW = {"question": "What is 2 + 2?", "answer": "4"}
OWN = {"question": "What is 3 + 3?", "answer": "6"}


def attempt(group: int = 0, sample: int = 0) -> Attempt:
    task = Task(task_id=str(group), row={**ROW, "id": group}, group_id=f"000001.{group:03d}")
    return Attempt(task=task, sample_index=sample, step=1)


class Program:
    """What a program elsewhere does, by plain HTTP."""

    def __init__(self, http: httpx2.AsyncClient, url: str, key: str) -> None:
        self.http, self.url, self.key = http, url, key

    async def call(self, method: str, path: str, key: str | None = None, **body: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        url = f"{self.url}/agentrl/v1/sessions{path}"
        return await self.http.request(method, url, json=body or None, headers=headers)

    async def start(self, **wish: Any) -> Any:
        reply = await self.call("POST", "", **{"wait_seconds": 30, **wish})
        assert reply.status_code == 201, reply.text
        return SimpleNamespace(**reply.json())

    def open(self, session: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=session.base_urls["openai"], api_key=session.api_key, max_retries=0
        )

    async def ask(self, session: Any, content: str = "hi") -> Any:
        async with self.open(session) as client:
            return await client.chat.completions.create(
                model=session.model, messages=[{"role": "user", "content": content}]
            )

    async def finish(self, session: Any, **end: Any) -> None:
        """One call of the model, and the end."""
        await self.ask(session)
        reply = await self.call("POST", f"/{session.id}/end", **end)
        assert reply.status_code == 200, reply.text


Outside = Callable[..., Any]


@pytest.fixture
async def outside(open_client: Any, scripted_engine: Any, monkeypatch: Any) -> Outside:
    """Listens for programs that take the attempts: ``async with outside([attempt()], ...)``."""
    monkeypatch.delenv("AGENTRL_API_KEY", raising=False)

    @asynccontextmanager
    async def run(
        attempts: list[Attempt], *, reward_fn: Any = None, max_wait: float = 30, **options: Any
    ) -> AsyncIterator[Any]:
        engine = scripted_engine(options.pop("replies", lambda _: "4"))
        external = {
            "idle_timeout_seconds": options.pop("idle", 30),
            "max_sessions_per_attempt": 3,
            "max_wait_seconds": max_wait,
        }
        rollout = RolloutConfig(agent_mode="external", external=external, **options)
        shown: list[str] = []
        workflow = ExternalWorkflow(
            ExternalListener(rollout, shown.append),
            reward=AsyncRewardWrapper(reward_fn, timeout_seconds=5) if reward_fn else None,
            gconfig=GenerationConfig(),
            rollout=rollout,
            open_client=open_client,
            split="train",
        )
        tasks = [asyncio.create_task(workflow.arun_trajectory(engine, a)) for a in attempts]
        while not shown:
            await asyncio.sleep(0.01)
        own_key = os.environ.get("AGENTRL_API_KEY")
        url, *shown_keys = re.findall(r"=(\S+)\n", shown[0])
        assert len(shown_keys) == (own_key is None)
        key = own_key or shown_keys[0]
        async with httpx2.AsyncClient(timeout=60) as http:
            try:
                yield SimpleNamespace(program=Program(http, url, key), tasks=tasks, engine=engine)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    return run


async def judge(completions: str, answer: str) -> float:
    return float(completions == answer)


async def test_a_program_takes_a_task_and_its_trajectory_comes_back(outside: Outside) -> None:
    async with outside([attempt()], reward_fn=judge) as it:
        session = await it.program.start()
        assert session.task == {**ROW, "id": 0}
        assert (session.trajectory_id, session.split) == ("000001.000/0", "train")
        reply = await it.program.ask(session)
        shown = (await it.program.call("GET", f"/{session.id}")).json()
        assert (shown["state"], shown["interactions"][0]["id"]) == ("open", reply.id)
        ended = await it.program.call("POST", f"/{session.id}/end")
        assert ended.json() == {"id": session.id, "state": "ended"}
        trajectory = await it.tasks[0]
        # A program that did not get the answer asks again.
        assert (await it.program.call("POST", f"/{session.id}/end")).status_code == 200
        assert (await it.program.call("GET", f"/{session.id}")).json()["state"] == "ended"
        late = await it.program.call("POST", f"/{session.id}/reward", reward=1)
        assert (late.status_code, late.json()["error"]["code"]) == (409, "session_ended")
        with pytest.raises(openai.AuthenticationError):
            await it.program.ask(session)
    assert (trajectory.reward, trajectory.failure, trajectory.final_answer) == (1.0, None, "4")
    assert (trajectory.id, trajectory.task) == ("000001.000/0", {**ROW, "id": 0})
    assert trajectory.interactions[0].turn_return == 1.0


async def test_rewards_of_the_program_go_before_the_reward_function(outside: Outside) -> None:
    async with outside([attempt(0), attempt(1), attempt(2)], reward_fn=judge) as it:
        program = it.program
        first = await program.start()
        replies = [await program.ask(first), await program.ask(first, "again")]
        await program.call("POST", f"/{first.id}/reward", rewards={replies[0].id: 0.25})
        await program.call("POST", f"/{first.id}/reward", reward=0.5)
        await program.call("POST", f"/{first.id}/end", final_answer="five")
        await program.finish(await program.start(task_id="2"), reward=None)
        await program.finish(await program.start(), error="the browser crashed")
        rewarded, failed, unscored = await asyncio.gather(*it.tasks)
    assert [i.reward for i in rewarded.interactions] == [0.25, 0.5]
    assert (rewarded.reward, rewarded.final_answer) == (0.5, "five")
    assert (unscored.reward, unscored.failure) == (None, None)
    assert (failed.failure.boundary, failed.reward) == (Boundary.AGENT, None)
    assert failed.failure.message == "the browser crashed"


async def test_a_task_given_back_or_left_alone_goes_to_another_program(outside: Outside) -> None:
    async with outside([attempt()], idle=2.0) as it:
        program = it.program
        first = await program.start()
        await program.ask(first)
        assert (await program.call("DELETE", f"/{first.id}")).status_code == 200
        second = await program.start()
        await program.ask(second)
        assert second.trajectory_id == first.trajectory_id
        third = await program.start()
        assert (await program.call("GET", f"/{second.id}")).json()["state"] == "expired"
        assert (await program.call("GET", f"/{first.id}")).json()["state"] == "abandoned"
        await program.finish(third, reward=1)
        trajectory = await it.tasks[0]
    assert (trajectory.num_turns, trajectory.reward, trajectory.failure) == (1, 1.0, None)


async def test_a_program_that_hung_up_is_given_no_task(outside: Outside) -> None:
    async with outside([attempt()], idle=30) as it:
        program = it.program
        first = await program.start()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(program.call("POST", "", wait_seconds=30), 0.3)
        await program.call("DELETE", f"/{first.id}")
        await asyncio.sleep(0.3)
        shown = (await program.call("GET", "")).json()
        assert shown == {"num_open_sessions": 0, "num_pending_tasks": 1}
        await program.finish(await program.start(), reward=1)
        trajectory = await it.tasks[0]
    assert trajectory.reward == 1.0


async def test_a_program_that_waits_when_the_run_ends_is_told_so(
    outside: Outside, open_client: Any
) -> None:
    async with outside([attempt()]) as it:
        await it.program.start()
        waiting = asyncio.create_task(it.program.call("POST", "", wait_seconds=30))
        await asyncio.sleep(0.3)
        client = open_client(it.engine, Sampling(), Budget())
        await client.close()
        await asyncio.wait_for(client.gateway.close(), 3)
        reply = await waiting
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "run_ended")


async def test_a_task_that_cannot_be_judged_is_a_failure_and_not_the_end(outside: Outside) -> None:
    attempts = [attempt(0), attempt(1)]
    async with outside(attempts, reward_fn=judge) as it:
        rewarded, not_rewarded = [
            await it.program.start(task={"question": "?"}, group_id=name) for name in "ab"
        ]
        await it.program.finish(rewarded, reward=0.5)
        await it.program.finish(not_rewarded)
        good, bad = await asyncio.gather(*it.tasks)
    assert (good.reward, good.failure) == (0.5, None)
    assert bad.failure.boundary is Boundary.REWARD
    assert "needs answer" in bad.failure.message
    assert bad.num_turns == 1


async def test_what_is_lost_too_often_is_a_failure(outside: Outside) -> None:
    async with outside([attempt()]) as it:
        for _ in range(3):
            session = await it.program.start()
            await it.program.ask(session)
            await it.program.call("DELETE", f"/{session.id}")
        trajectory = await it.tasks[0]
    assert trajectory.failure.kind == "SessionLostError"
    assert (trajectory.num_turns, trajectory.reward) == (1, None)


async def test_own_tasks_take_the_place_of_a_group(outside: Outside) -> None:
    attempts = [attempt(g, s) for g in range(2) for s in range(2)]
    async with outside(attempts, reward_fn=judge, replies=lambda _: "6") as it:
        program = it.program
        refused = await program.call("POST", "", task=OWN)
        assert "needs a group_id" in refused.json()["error"]["message"]
        sessions = [await program.start(task=OWN, group_id="mine")]
        sessions.append(await program.start(group_id="mine"))
        assert [s.task for s in sessions] == [OWN, OWN]
        full = await program.call("POST", "", group_id="mine", wait_seconds=0)
        assert full.json()["error"]["code"] == "group_is_full"
        other = await program.call("POST", "", group_id="mine", task=ROW, wait_seconds=0)
        assert other.json()["error"]["code"] == "other_task"
        sessions += [await program.start(), await program.start()]
        assert [s.group_id for s in sessions] == ["mine", "mine", "000001.001", "000001.001"]
        none = await program.call("POST", "", wait_seconds=0)
        assert (none.status_code, none.headers["retry-after"]) == (503, "1")
        for session in sessions:
            await program.finish(session)
        done = await asyncio.gather(*it.tasks)
    assert [(t.id, t.task_id, t.reward) for t in done] == [
        ("000001.000/0", "mine", 1.0),
        ("000001.000/1", "mine", 1.0),
        ("000001.001/0", "1", 0.0),
        ("000001.001/1", "1", 0.0),
    ]


@pytest.mark.slow
async def test_a_program_that_takes_too_long_is_out_of_time(outside: Outside) -> None:
    async with outside([attempt()], timeout_seconds=3.0) as it:
        session = await it.program.start()
        await it.program.ask(session)
        trajectory = await it.tasks[0]
    assert trajectory.failure.boundary is Boundary.TIMEOUT
    assert trajectory.stop_reason is StopReason.MAX_SECONDS
    assert trajectory.interactions[0].status is InteractionStatus.COMPLETED


async def test_a_run_that_nobody_serves_stops_and_says_so(outside: Outside) -> None:
    async with outside([attempt()], max_wait=0.2) as it:
        with pytest.raises(RunError, match=r"max_wait_seconds\). Start the program"):
            await it.tasks[0]


async def test_keys_open_their_own_routes_alone(outside: Outside) -> None:
    async with outside([attempt(0), attempt(1)]) as it:
        program = it.program
        one, two = await program.start(), await program.start()
        reply = await program.ask(one)
        crossed = await program.call("POST", f"/{two.id}/reward", rewards={reply.id: 1})
        assert crossed.json()["error"]["code"] == "unknown_interaction"
        two.api_key, key_of_two = program.key, two.api_key
        with pytest.raises(openai.AuthenticationError):
            await program.ask(two)
        two.api_key = key_of_two
        async with program.open(one) as mine, program.open(two) as theirs:
            said = await mine.responses.create(model="m", input="secret")
            reply_to = {"model": "m", "input": "go on", "previous_response_id": said.id}
            with pytest.raises(openai.BadRequestError, match="in this session"):
                await theirs.responses.create(**reply_to)
            await mine.responses.create(**reply_to)
        shown = (await program.call("GET", f"/{two.id}")).json()
        assert shown["interactions"] == []
        await every_route_needs_the_admin_key(program, one)


async def every_route_needs_the_admin_key(program: Program, session: Any) -> None:
    for key in ("", session.api_key, program.key[:-1], program.key + "x", "\u03a9"):
        headers = {"Authorization": f"Bearer {key}".strip().encode()}
        for path in ("", f"/{session.id}", f"/{session.id}/reward", f"/{session.id}/end", "/x/y"):
            for method in ("GET", "POST", "DELETE", "PUT"):
                url = f"{program.url}/agentrl/v1/sessions{path}"
                reply = await program.http.request(method, url, headers=headers)
                assert reply.json()["error"]["code"] == "invalid_admin_key", (method, path, key)
                assert (reply.status_code, program.key in reply.text) == (401, False)


MISTAKES = [
    ("", {"tsk_id": "1"}, "unknown_field"),
    ("", {"task": "text"}, "invalid_task"),
    ("", {"task": {"agent_name": ["x"]}, "group_id": "new"}, "invalid_task"),
    ("", {"group_id": "new"}, "unknown_group"),
    ("", {"task_id": "3", "group_id": "new"}, "invalid_request"),
    ("", {"wait_seconds": "long"}, "invalid_request"),
    ("", {"task_id": "99", "wait_seconds": 0}, "no_task"),
    ("/nope/end", {}, "unknown_session"),
    ("/ID/end", {"reward": 10**400}, "invalid_reward"),
    ("/ID/end", {"final_answer": 5}, "invalid_request"),
    ("/ID/nope", {}, "unknown_path"),
    ("/ID/reward", {}, "invalid_reward"),
    ("/ID/reward", {"reward": "1"}, "invalid_reward"),
    ("/ID/reward", {"reward": 1, "interaction_id": [1]}, "invalid_request"),
    ("/ID/reward", {"reward": 1, "interaction_id": None}, "invalid_request"),
    ("/ID/reward", {"reward": 1, "interaction_id": "chatcmpl-x"}, "unknown_interaction"),
    ("/ID/reward", {"rewards": "FAILED"}, "unknown_interaction"),
    ("/ID/reward", {"rewards": [1]}, "invalid_reward"),
    ("/ID/reward", {"reward": "x" * 65 * 2**20}, "request_too_large"),
]


async def test_mistakes_have_a_name_and_change_nothing(outside: Outside) -> None:
    replies = iter(["4", RuntimeError("failed")])
    async with outside([attempt(0), attempt(1)], replies=lambda _: next(replies)) as it:
        session = await it.program.start()
        asked = await it.program.ask(session)
        with pytest.raises(openai.InternalServerError):
            await it.program.ask(session)
        shown = (await it.program.call("GET", f"/{session.id}")).json()["interactions"]
        assert [i["id"] == asked.id for i in shown] == [True, False]
        for path, body, code in MISTAKES:
            if body.get("rewards") == "FAILED":
                body = {"rewards": {shown[1]["id"]: 1}}
            reply = await it.program.call("POST", path.replace("ID", session.id), **body)
            assert reply.json()["error"]["code"] == code, (path, code)
            assert 400 <= reply.status_code < 500 or reply.status_code == 503
        shown = (await it.program.call("GET", f"/{session.id}")).json()["interactions"]
        assert [i["reward"] for i in shown] == [None, None]
        path, body = f"/{session.id}/reward", {"reward": 0.5, "interaction_id": asked.id}
        assert (await it.program.call("POST", path, **body)).status_code == 200
        await it.program.call("POST", f"/{session.id}/end")
        assert (await it.tasks[0]).interactions[0].reward == 0.5


@pytest.mark.parametrize(
    ("host", "key", "message"),
    [
        ("0.0.0.0", None, "lets other machines in"),
        ("127.0.0.1", "short", "has 5 characters"),
        ("256.1.1.1", "k" * 24, "cannot be used"),
    ],
)
def test_other_machines_are_kept_out_by_default(
    monkeypatch: Any, host: str, key: Any, message: str
) -> None:
    monkeypatch.delenv("AGENTRL_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("AGENTRL_API_KEY", key)
    config = RolloutConfig(agent_mode="external", external={"host": host})
    with pytest.raises(UserInputError, match=message):
        ExternalListener(config, print)


async def test_a_key_of_the_users_own_is_not_shown(outside: Outside, monkeypatch: Any) -> None:
    monkeypatch.setenv("AGENTRL_API_KEY", "k" * 24)
    async with outside([attempt()]) as it:
        await it.program.finish(await it.program.start(), reward=1)
        assert (await it.tasks[0]).reward == 1.0
