"""What comes together at the worst moment: ends, cancellations and repetitions of calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
BODY = {"model": "m", "messages": [USER]}
RETRY = {"x-stainless-retry-count": "1"}
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
#: Far more than anything here takes: what waits longer waits for ever.
_SECONDS = 5.0


def post(client: TrackingClient, body: dict[str, Any], **headers: str) -> asyncio.Task[Any]:
    sent = client.gateway.http_client.post(
        "http://x.invalid/v1/chat/completions",
        content=json.dumps(body),
        headers={"Authorization": f"Bearer {client.session_key}", **headers},
    )
    return asyncio.create_task(sent)


def read_text(reply: Any) -> str:
    return str(reply.json()["choices"][0]["message"]["content"])


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


@STREAMED
async def test_a_retry_while_the_first_is_being_cancelled_is_a_call_of_its_own(
    open_client: Open, stream: bool
) -> None:
    client = open_client("lost", "forty two")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    slow_to_abort(engine)
    body = {**BODY, "stream": stream}
    first = post(client, body)
    await wait_until(lambda: bool(engine.prompts))
    first.cancel()
    await asyncio.sleep(0.01)
    assert client.interactions == (), "the engine still aborts the first call"
    engine.gate.set()
    async with asyncio.timeout(_SECONDS):
        reply = await post(client, body, **RETRY)
    assert reply.status_code == 200
    await wait_until(lambda: len(client.interactions) == 2)
    assert [i.status for i in client.interactions] == [
        InteractionStatus.CANCELLED,
        InteractionStatus.COMPLETED,
    ]


def slow_to_abort(engine: Any) -> None:
    """Makes the engine take its time to abort a call, as one behind a socket does."""
    genuine = engine.stream

    async def stream(*args: Any, **options: Any) -> AsyncIterator[Any]:
        try:
            async for piece in genuine(*args, **options):
                yield piece
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            raise

    engine.stream = stream


@STREAMED
async def test_a_session_that_closes_as_a_call_comes_in_lets_nobody_wait(
    open_client: Open, stream: bool
) -> None:
    client = open_client("forty two")
    call = post(client, {**BODY, "stream": stream})
    closed = asyncio.Event()

    def close_as_soon_as_it_runs() -> None:
        # Every turn of the loop, so that no moment of the call is left out.
        if client.gateway._answers.num_running:
            client.gateway.close_session(client.session)
            closed.set()
        else:
            asyncio.get_running_loop().call_soon(close_as_soon_as_it_runs)

    close_as_soon_as_it_runs()
    async with asyncio.timeout(_SECONDS):
        await closed.wait()
        reply = await call
    assert "opens no session" in reply.text
    assert client.gateway._answers.num_running == 0
    assert InteractionStatus.COMPLETED not in {i.status for i in client.interactions}


async def test_a_call_whose_session_closes_while_its_body_comes_in_is_refused(
    open_client: Open,
) -> None:
    client = open_client("never")
    url = f"{await client.gateway.serve()}/chat/completions"
    text = json.dumps(BODY).encode()
    half_sent, closed = asyncio.Event(), asyncio.Event()

    async def send_slowly() -> AsyncIterator[bytes]:
        yield text[:10]
        half_sent.set()
        await closed.wait()
        yield text[10:]

    headers = {"Authorization": f"Bearer {client.session_key}"}
    async with httpx2.AsyncClient() as http:
        call = asyncio.create_task(http.post(url, content=send_slowly(), headers=headers))
        await half_sent.wait()
        await asyncio.sleep(0.05)
        await client.gateway.end_session(client.session)
        closed.set()
        assert (await call).status_code == 401
    assert client.interactions == ()
    assert client.gateway.engine.prompts == []  # type: ignore[attr-defined]


async def test_a_retry_of_what_was_refused_for_load_is_no_repetition_of_its_twin(
    open_client: Open,
) -> None:
    client = open_client("one", "two")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    client.gateway.limits = type(client.gateway.limits)(max_session_calls=1)
    first = post(client, BODY)
    await wait_until(lambda: bool(engine.prompts))
    assert (await post(client, BODY)).status_code == 429
    engine.gate.set()
    texts = [read_text(await first), read_text(await post(client, BODY, **RETRY))]
    assert texts == ["one", "two"]


async def test_a_gateway_that_closes_leaves_no_call_running(open_client: Open) -> None:
    client = open_client("never")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    call = post(client, BODY)
    await wait_until(lambda: bool(engine.prompts))
    await client.gateway.close()
    async with asyncio.timeout(_SECONDS):
        reply = await call
    assert reply.status_code == 401
    assert engine.num_aborted == 1
    assert [i.status for i in client.interactions] == [InteractionStatus.CANCELLED]


async def test_no_retry_count_breaks_the_gateway(open_client: Open) -> None:
    client = open_client(*"abc")
    for count in ("9" * 5000, "-1", "²"):
        reply = await client.gateway.http_client.post(
            "http://x.invalid/v1/chat/completions",
            content=json.dumps(BODY),
            headers=[
                (b"authorization", f"Bearer {client.session_key}".encode()),
                (b"x-stainless-retry-count", count.encode("latin-1")),
            ],
        )
        assert reply.status_code == 200, reply.text


@STREAMED
async def test_whenever_a_client_leaves_nothing_runs_on_and_nothing_half_is_trained(
    open_client: Open, stream: bool
) -> None:
    seen = set()
    for num_turns_of_the_loop in range(60):
        client = open_client("What is the weather in Paris? The answer is forty two.", "sunny")
        engine: Any = client.gateway.engine
        call = post(client, {**BODY, "stream": stream})
        for _ in range(num_turns_of_the_loop):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert client.gateway._answers.num_running == 0
        assert client.session._open_calls == {}
        statuses = {i.status for i in client.interactions}
        completed = [i.id for i in client.interactions if i.status is InteractionStatus.COMPLETED]
        assert list(client.export_interactions()) == completed
        assert len(completed) + engine.num_aborted == len(engine.prompts)
        # The agent asks again: a call that was cut off is nobody's parent, and cost no tokens.
        reply = await post(client, {**BODY, "messages": [USER, {**USER, "content": "?"}]})
        assert reply.status_code == 200
        last = client.interactions[-1]
        assert (last.parent_id, last.break_cause) == (None, None)
        sampled = sum(len(i.completion_ids) for i in client.interactions)
        assert client.session._num_tokens == sampled
        seen |= statuses
        seen.add("before" if not statuses else "after")
    assert seen == {"before", "after", InteractionStatus.CANCELLED, InteractionStatus.COMPLETED}
