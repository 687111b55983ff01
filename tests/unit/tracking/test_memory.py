"""500 sessions in one gateway: nobody hears another, and nothing stays when they have ended."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from agentrl_cli.tracking import tree
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway import Gateway
from agentrl_cli.tracking.session import Session, collect_sessions

Open = Callable[..., TrackingClient]
NUM_SESSIONS = 500
NUM_TURNS = 3
RETRY = {"x-stainless-retry-count": "1"}


def echo(prompt: str) -> str:
    return prompt.rsplit("user\n", 1)[1].split("<|im_end|>")[0]


Post = Callable[[str, dict[str, Any], dict[str, str]], Any]


async def run_session(gateway: Gateway, number: int, post: Post, watched: list[Any]) -> None:
    """A conversation in which every turn must come back to who said it; then its export."""
    session = gateway.open_session()
    headers = {"Authorization": f"Bearer {session.key}"}
    messages: list[Any] = []
    for turn in range(NUM_TURNS):
        said = f"{number} says {turn}"
        messages.append({"role": "user", "content": said})
        body = {"model": "m", "messages": messages, "stream": False}
        reply = await post("/v1/chat/completions", body, headers)
        assert reply["choices"][0]["message"]["content"] == said
        if turn == 0:
            again = await post("/v1/chat/completions", body, headers | RETRY)
            assert again["id"] == reply["id"]
        messages.append(reply["choices"][0]["message"])
    assert len(session.interactions) == NUM_TURNS
    assert all(i.extends_parent for i in session.interactions[1:])
    [exported] = session.export_interactions().values()
    assert sum(exported.loss_mask) == sum(i.num_completion_tokens for i in session.interactions)
    watched += [weakref.ref(session), weakref.ref(session.tree)]
    await gateway.end_session(session)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in process", "socket"])
async def test_500_sessions_do_not_mix_and_leave_nothing(open_client: Open, way: str) -> None:
    first = open_client(*[echo] * (NUM_SESSIONS * NUM_TURNS))
    gateway: Any = first.gateway
    engine: Any = gateway.engine
    watched: list[Any] = []
    http, root = gateway.http_client, "http://x.invalid"
    if way == "socket":
        http = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None))
        root = (await gateway.serve()).removesuffix("/v1")

    async def post(path: str, body: Any, headers: Any) -> Any:
        return (await http.post(root + path, json=body, headers=headers, timeout=60)).json()

    works = [run_session(gateway, n, post, watched) for n in range(NUM_SESSIONS)]
    await asyncio.gather(*works)
    await http.aclose()
    del works
    await asyncio.sleep(0.05)
    gc.collect()
    assert gateway.num_open_sessions == 1
    assert len(engine.prompts) == NUM_SESSIONS * NUM_TURNS, "a retry was sampled"
    book = gateway._replies
    assert (book.num_running, len(book._kept), book._by_session, book._num_kept_bytes) == (
        0, 0, {}, 0,
    )  # fmt: skip
    alive = [ref() for ref in watched if ref() is not None]
    assert len(watched) == 2 * NUM_SESSIONS
    assert alive == []


@pytest.mark.slow
async def test_a_server_does_not_hold_the_trajectory_that_first_needed_it(
    open_client: Open,
) -> None:
    client = open_client("a", "b")
    gateway = client.gateway

    async def run() -> weakref.ref[list[Session]]:
        with collect_sessions() as sessions:
            base_url = await gateway.serve()
            assert sessions == []
        async with httpx2.AsyncClient() as http:
            headers = {"Authorization": f"Bearer {client.session_key}"}
            assert (await http.get(f"{base_url}/models", headers=headers)).status_code == 200
        collected = gateway.open_session()
        assert sessions == [], "opened outside of the block"
        await gateway.end_session(collected)
        return weakref.ref(collected)

    held = await asyncio.create_task(run())
    gc.collect()
    assert held() is None


async def test_what_is_forgotten_is_not_held_by_the_last_request(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree, "_MAX_HELD", 10)
    client = open_client(*[echo] * 20)
    held = client.session.tree
    roots, messages = {id(held._root): held._root}, []
    for turn in range(20):
        messages.append({"role": "user", "content": f"says {turn}"})
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        roots[id(held._root)] = held._root
        assert held._latest[0].beginnings[0] is held._root
    assert len(roots) > 2
    assert all(i.extends_parent for i in client.interactions[1:])
