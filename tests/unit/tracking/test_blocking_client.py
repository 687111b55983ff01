"""The stock ``OpenAI`` of agents that block, on the session of a tracking client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_cli.tracking.blocking_client import (
    BlockingCallError,
    BlockingTrackingClient,
    build_blocking_client,
)
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What?"}


def ask(client: Any) -> str:
    completion = client.chat.completions.create(model="m", messages=[USER])
    return str(completion.choices[0].message.content)


@pytest.mark.parametrize("method", ["copy", "with_options"])
async def test_a_copy_is_on_the_same_session(open_client: Open, method: str) -> None:
    client = open_client("one", "two", "three")
    blocking = build_blocking_client(client)

    def work() -> list[str]:
        copied = getattr(blocking, method)(timeout=5, max_retries=4)
        assert isinstance(copied, BlockingTrackingClient)
        assert (copied.timeout, copied.max_retries) == (5, 4)
        again = copied.with_options(timeout=6)
        return [ask(blocking), ask(copied), ask(again)]

    assert await asyncio.to_thread(work) == ["one", "two", "three"]
    assert len(client.interactions) == 3
    copied = getattr(blocking, method)(timeout=5)
    with pytest.raises(BlockingCallError, match="on the event loop"):
        ask(copied)
    await client.close()
    with pytest.raises(BlockingCallError, match="has ended"):
        await asyncio.to_thread(ask, copied.with_options(max_retries=0))
    assert len(client.interactions) == 3
