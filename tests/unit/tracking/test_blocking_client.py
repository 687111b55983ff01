"""The stock ``OpenAI`` of agents that block, on the session of a tracking client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from agentrl_cli.blocking_clients import BlockingCallError, build_blocking_client
from agentrl_cli.tracking.client import BlockingTrackingClient, TrackingClient
from agentrl_cli.tracking.gateway_socket import OwnLoopError

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What?"}


def ask(client: Any) -> str:
    completion = client.chat.completions.create(model="m", messages=[USER])
    return str(completion.choices[0].message.content)


@pytest.mark.parametrize("method", ["copy", "with_options"])
async def test_a_copy_is_on_the_same_session(open_client: Open, method: str) -> None:
    client = open_client("one", "two", "three")
    blocking = build_blocking_client(client)
    assert client.gateway.socket_urls == (str(blocking.base_url).rstrip("/"),)

    def work() -> list[str]:
        copied = getattr(blocking, method)(timeout=5, max_retries=4)
        assert isinstance(copied, BlockingTrackingClient)
        assert (copied.timeout, copied.max_retries) == (5, 4)
        again = copied.with_options(timeout=6)
        return [ask(blocking), ask(copied), ask(again)]

    assert await asyncio.to_thread(work) == ["one", "two", "three"]
    assert len(client.interactions) == 3
    # Also after calls that another thread made.
    with pytest.raises(OwnLoopError, match="on the event loop that has to answer it"):
        ask(getattr(blocking, method)(timeout=5))
    await client.close()
    with pytest.raises(openai.AuthenticationError, match="its trajectory has ended"):
        await asyncio.to_thread(ask, blocking)
    assert len(client.interactions) == 3


async def test_it_streams_rewards_and_is_cut_off_with_its_session(open_client: Open) -> None:
    client = open_client("one two three", "never")
    blocking: Any = build_blocking_client(client)
    engine: Any = client.gateway.engine

    def read() -> str:
        stream = blocking.chat.completions.create(model="m", messages=[USER], stream=True)
        return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)

    def reward() -> list[Any]:
        blocking.set_reward(blocking.interactions[0].id, 0.5)
        blocking.set_final_reward(0.75)
        return [i.reward for i in client.interactions]

    assert await asyncio.to_thread(read) == "one two three"
    assert await asyncio.to_thread(reward) == [0.75]
    engine.gate = asyncio.Event()
    call = asyncio.create_task(asyncio.to_thread(ask, blocking))
    while len(engine.prompts) < 2:
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(openai.AuthenticationError, match="its trajectory has ended"):
        await call
    assert engine.num_aborted == 1
    with pytest.raises(BlockingCallError, match="no reward is taken any more"):
        await asyncio.to_thread(reward)
