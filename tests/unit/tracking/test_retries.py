"""Calls that SDKs repeat, and calls whose client went away: what is sampled and recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking import gateway as gateway_module
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
Ask = Callable[..., Awaitable[str]]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
BODY = {"model": "m", "messages": [USER]}
RETRY = {"x-stainless-retry-count": "1"}
#: Far more than anything here takes: what waits longer waits for ever.
_SECONDS = 5.0


async def ask_chat(options: dict[str, Any], stream: bool) -> str:
    async with openai.AsyncOpenAI(**options) as client:
        reply: Any = await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        if stream:
            return "".join([c.choices[0].delta.content or "" async for c in reply if c.choices])
        return str(reply.choices[0].message.content)


async def ask_responses(options: dict[str, Any], stream: bool) -> str:
    async with openai.AsyncOpenAI(**options) as client:
        reply: Any = await client.responses.create(model="m", input=[USER], stream=stream)
        if stream:
            events = [e async for e in reply]
            return "".join(e.delta for e in events if e.type == "response.output_text.delta")
        return str(reply.output_text)


async def ask_messages(options: dict[str, Any], stream: bool) -> str:
    options["base_url"] = options["base_url"].removesuffix("/v1")
    async with anthropic.AsyncAnthropic(**options) as client:
        reply: Any = await client.messages.create(
            model="m", max_tokens=100, messages=[USER], stream=stream
        )
        if stream:
            events = [e async for e in reply]
            return "".join(e.delta.text for e in events if e.type == "content_block_delta")
        return str(reply.content[0].text)


PROTOCOLS = pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class LosingTransport(httpx2.AsyncHTTPTransport):
    """Loses the first reply, as a connection does that breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.retry_counts: list[str] = []

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self.retry_counts.append(request.headers["x-stainless-retry-count"])
        response = await super().handle_async_request(request)
        if len(self.retry_counts) == 1:
            await response.aread()
            raise httpx2.ReadError("the connection broke")
        return response


async def list_options(client: TrackingClient, **options: Any) -> dict[str, Any]:
    return {"base_url": await client.gateway.serve(), "api_key": client.session_key, **options}


def post(client: TrackingClient, body: dict[str, Any], **headers: str) -> asyncio.Task[Any]:
    sent = client.gateway.http_client.post(
        "http://x.invalid/v1/chat/completions",
        content=json.dumps(body),
        headers={"Authorization": f"Bearer {client.session_key}", **headers},
    )
    return asyncio.create_task(sent)


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_SECONDS):
        while not condition():
            await asyncio.sleep(0.001)


@PROTOCOLS
@STREAMED
async def test_a_retry_after_the_record_gets_the_same_answer(
    open_client: Open, ask: Ask, stream: bool
) -> None:
    client = open_client("The answer is forty two.", "another one")
    transport = LosingTransport()
    async with httpx2.AsyncClient(transport=transport) as http:
        options = await list_options(client, http_client=http, max_retries=2)
        assert await ask(options, stream) == "The answer is forty two."
    assert transport.retry_counts == ["0", "1"]
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.COMPLETED
    assert len(client.gateway.engine.prompts) == 1  # type: ignore[attr-defined]


@PROTOCOLS
@STREAMED
async def test_a_retry_after_a_broken_call_is_sampled_and_the_broken_one_is_not_trained(
    open_client: Open, ask: Ask, stream: bool
) -> None:
    client = open_client("The answer is lost.", "The answer is forty two.")
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 3
    broken_call = asyncio.create_task(ask(await list_options(client), stream))
    await wait_until(lambda: bool(engine.prompts))
    broken_call.cancel()
    await wait_until(lambda: bool(client.interactions))
    engine.gate.set()

    options = await list_options(client, default_headers=RETRY)
    assert await ask(options, stream) == "The answer is forty two."
    broken, completed = client.interactions
    assert broken.status is InteractionStatus.CANCELLED
    assert completed.status is InteractionStatus.COMPLETED
    assert completed.parent_id is None
    assert list(client.export_interactions("individual")) == [completed.id]
    assert engine.num_aborted == 1


async def test_a_retry_joins_the_call_in_flight_and_keeps_it_alive(open_client: Open) -> None:
    client = open_client("forty two", "never")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    first = post(client, BODY)
    await wait_until(lambda: bool(engine.prompts))
    second = post(client, BODY, **RETRY)
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    engine.gate.set()
    reply = (await second).json()
    assert reply["choices"][0]["message"]["content"] == "forty two"
    [interaction] = client.interactions
    assert (interaction.id, interaction.status) == (reply["id"], InteractionStatus.COMPLETED)
    assert engine.num_aborted == 0


async def test_only_what_says_that_it_is_a_retry_is_one(open_client: Open) -> None:
    client = open_client("a", "b", "c", "d")
    other = TrackingClient(gateway=client.gateway)
    replies = [
        await post(client, BODY),
        await post(client, BODY),
        await post(client, BODY, **{"x-stainless-retry-count": "0"}),
        await post(client, BODY, **RETRY),
        await post(client, BODY, **{"x-stainless-retry-count": "2"}),
        await post(other, BODY, **RETRY),
    ]
    texts = [r.json()["choices"][0]["message"]["content"] for r in replies]
    # A retry gets the latest answer; that of another session is nothing to it.
    assert texts[:3] == ["a", "b", "c"]
    assert set(texts[3:5]) <= {"a", "b", "c"}
    assert texts[5] == "d"
    assert (len(client.interactions), len(other.interactions)) == (3, 1)
    await other.close()


async def test_another_body_is_another_call_and_errors_are_not_kept(open_client: Open) -> None:
    client = open_client("a", "b", RuntimeError("once"), "c")
    await post(client, BODY)
    reply = await post(client, {**BODY, "temperature": 0.5}, **RETRY)
    assert reply.json()["choices"][0]["message"]["content"] == "b"
    asked = {**BODY, "temperature": 0.25}
    assert (await post(client, asked)).status_code == 500
    reply = await post(client, asked, **RETRY)
    assert reply.json()["choices"][0]["message"]["content"] == "c"


async def test_of_equal_calls_the_one_that_did_not_arrive_is_repeated(open_client: Open) -> None:
    client = open_client("arrived", "lost")
    engine: Any = client.gateway.engine
    await post(client, BODY)
    base_url = await client.gateway.serve()
    headers = {"Authorization": f"Bearer {client.session_key}"}
    async with httpx2.AsyncClient() as http:
        # The connection breaks with the first byte: what follows reaches nobody.
        url = f"{base_url}/chat/completions"
        engine.gate, engine.gate_position = asyncio.Event(), 1
        body = json.dumps({**BODY, "stream": True})
        async with http.stream("POST", url, content=body, headers=headers):
            pass
    await wait_until(lambda: len(client.interactions) == 2)
    reply = await post(client, BODY, **RETRY)
    assert reply.json()["choices"][0]["message"]["content"] == "arrived"


async def test_kept_answers_are_few_and_go_with_their_session(open_client: Open) -> None:
    client = open_client(*["x" * 50] * 40)
    book = client.gateway._replies
    book._max_kept, book._max_kept_bytes = 5, 10_000
    for number in range(20):
        await post(client, {**BODY, "seed": number})
    assert len(book._kept) == 5
    book._max_kept_bytes = 1_000
    await post(client, {**BODY, "seed": 20})
    assert book._num_kept_bytes == sum(a.num_bytes for a in book._kept) <= 1_000
    assert await forgets(client, {**BODY, "seed": 0})
    await client.close()
    assert (book._kept, book._by_session, book._num_kept_bytes) == ({}, {}, 0)


async def forgets(client: TrackingClient, body: dict[str, Any]) -> bool:
    num_sampled = len(client.interactions)
    await post(client, body, **RETRY)
    return len(client.interactions) == num_sampled + 1


@STREAMED
@pytest.mark.parametrize("ended", ["session", "gateway"])
async def test_an_end_cancels_the_calls_in_flight(
    open_client: Open, ended: str, stream: bool
) -> None:
    client = open_client("forty two")
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 1
    call = post(client, {**BODY, "stream": stream})
    await wait_until(lambda: bool(engine.prompts))
    await asyncio.sleep(0.02)
    if ended == "session":
        await client.gateway.end_session(client.session)
    else:
        await client.gateway.close()
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.CANCELLED
    assert engine.num_aborted == 1
    async with asyncio.timeout(_SECONDS):
        reply = await call
    assert "opens no session" in reply.text
    assert reply.status_code == (200 if stream else 401)


async def test_of_several_choices_none_counts_when_the_reply_is_never_given(
    open_client: Open,
) -> None:
    client = open_client("a", RuntimeError("the second fails"))
    reply = await post(client, {**BODY, "n": 2})
    assert reply.status_code == 500
    assert InteractionStatus.COMPLETED not in {i.status for i in client.interactions}
    assert len(client.interactions) == 2


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
        if client.gateway._replies.num_running:
            client.gateway.close_session(client.session)
            closed.set()
        else:
            asyncio.get_running_loop().call_soon(close_as_soon_as_it_runs)

    close_as_soon_as_it_runs()
    async with asyncio.timeout(_SECONDS):
        await closed.wait()
        reply = await call
    assert "opens no session" in reply.text
    assert client.gateway._replies.num_running == 0
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
    replies = [await first, await post(client, BODY, **RETRY)]
    assert [r.json()["choices"][0]["message"]["content"] for r in replies] == ["one", "two"]


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
        assert client.gateway._replies.num_running == 0
        assert client.session._open_calls == {}
        statuses = {i.status for i in client.interactions}
        completed = [i.id for i in client.interactions if i.status is InteractionStatus.COMPLETED]
        assert list(client.export_interactions()) == completed
        assert len(completed) + engine.num_aborted == len(engine.prompts)
        # The agent asks again: a call that was cut off is nobody's parent, and cost no tokens.
        reply = await post(client, {**BODY, "messages": [USER, {**USER, "content": "?"}]})
        assert reply.status_code == 200
        last = client.interactions[-1]
        assert (last.parent_id, last.mismatch_cause) == (None, None)
        sampled = sum(len(i.completion_ids) for i in client.interactions)
        assert client.session._num_tokens == sampled
        seen |= statuses
        seen.add("before" if not statuses else "after")
    assert seen == {"before", "after", InteractionStatus.CANCELLED, InteractionStatus.COMPLETED}


@pytest.mark.parametrize("count", ["1", "00", "9" * 5000, "-1", "²"])
def test_no_retry_count_breaks_the_gateway(count: str) -> None:
    is_retry = count in ("1", "9" * 5000)
    assert gateway_module._is_retry({"x-stainless-retry-count": count}) is is_retry
