"""Clients of the agent's own that cannot be answered, or speak to somebody else."""

from __future__ import annotations

import time
import urllib.request

import pytest
from openai import AsyncOpenAI, OpenAI

from agentrl_cli.records import Boundary


def ask(client, model):
    return client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is 20 + 22?"}]
    )


async def test_a_blocking_client_in_async_code_is_refused_at_once(play_agent):
    """It would stop the event loop that has to answer it, and with it every deadline."""

    async def solve(data, base_url, api_key, model):
        return ask(OpenAI(base_url=base_url, api_key=api_key), model).choices[0].message.content

    async def fetch(data, base_url):
        with urllib.request.urlopen(f"{base_url}/models", timeout=20) as reply:  # noqa: ASYNC210 - the mistake
            return reply.read().decode()

    for function in (solve, fetch):
        started = time.monotonic()
        played = await play_agent(lambda function=function: function, timeout_seconds=30)
        assert time.monotonic() - started < 10
        failure = played.trajectory.failure
        assert (failure.boundary, failure.kind) == (Boundary.AGENT, "BlockingCallError")
        assert "AsyncOpenAI" in failure.message
        assert "agent_mode: subprocess" in failure.message


async def test_the_same_client_is_answered_in_a_function_that_blocks(play_agent):
    def solve(data, base_url, api_key, model):
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            return ask(client, model).choices[0].message.content

    played = await play_agent(lambda: solve, "42")
    assert (played.trajectory.failure, played.trajectory.reward) == (None, 1.0)


async def test_an_error_of_another_api_is_the_agents_and_not_the_gateways(play_agent):
    async def solve(data, client, model):
        await ask(client, model)
        async with AsyncOpenAI(
            base_url="http://127.0.0.1:9/v1", api_key="judge", max_retries=0
        ) as judge:
            await ask(judge, "judge")

    played = await play_agent(lambda: solve, "42")
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.AGENT, "APIConnectionError")
    assert "http://127.0.0.1:9/v1/chat/completions, not to agentrl" in failure.message


@pytest.mark.parametrize("named", ["client", "base_url"])
async def test_a_refused_request_is_the_gateways(play_agent, named):
    async def by_client(data, client, model):
        await client.chat.completions.create(model=model, messages=[], logit_bias={"1": 5})

    async def by_url(data, base_url, api_key, model):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            await client.chat.completions.create(model=model, messages=[], logit_bias={"1": 5})

    function = by_client if named == "client" else by_url
    played = await play_agent(lambda: function)
    failure = played.trajectory.failure
    assert (failure.boundary, failure.kind) == (Boundary.GATEWAY, "BadRequestError")


async def test_the_address_of_the_client_itself_leads_nowhere_and_says_so(play_agent):
    async def solve(data, client, model):
        async with AsyncOpenAI(
            base_url=client.base_url, api_key=client.api_key, max_retries=0
        ) as own:
            await ask(own, model)

    played = await play_agent(lambda: solve)
    assert "a function names base_url in its signature" in played.trajectory.failure.message
