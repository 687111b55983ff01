"""Calls that SDKs repeat, and calls whose client went away: what is sampled and recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from agentrl_cli.records import InteractionStatus
from agentrl_cli.tracking.client import TrackingClient

Open = Callable[..., TrackingClient]
Ask = Callable[[str, str, bool], Awaitable[str]]
USER: Any = {"role": "user", "content": "What is the weather in Paris?"}
RETRY = {"x-stainless-retry-count": "1"}


async def ask_chat(base_url: str, key: str, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2) as client:
        reply: Any = await client.chat.completions.create(model="m", messages=[USER], stream=stream)
        if stream:
            return "".join([c.choices[0].delta.content or "" async for c in reply if c.choices])
        return str(reply.choices[0].message.content)


async def ask_responses(base_url: str, key: str, stream: bool) -> str:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=2) as client:
        reply: Any = await client.responses.create(
            model="m", input="What is the weather in Paris?", stream=stream
        )
        if stream:
            events = [e async for e in reply]
            return "".join(e.delta for e in events if e.type == "response.output_text.delta")
        return str(reply.output_text)


async def ask_messages(base_url: str, key: str, stream: bool) -> str:
    root = base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=root, api_key=key, max_retries=2) as client:
        reply: Any = await client.messages.create(
            model="m", max_tokens=100, messages=[USER], stream=stream
        )
        if stream:
            events = [e async for e in reply]
            return "".join(e.delta.text for e in events if e.type == "content_block_delta")
        return str(reply.content[0].text)


PROTOCOLS = pytest.mark.parametrize("ask", [ask_chat, ask_responses, ask_messages])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class CuttingProxy:
    """Between an SDK and the gateway: breaks the first connections, then passes everything on."""

    def __init__(self, target_port: int, cut: Callable[[bytes], bool], times: int = 1) -> None:
        self._target_port = target_port
        self._cut = cut
        self._times = times
        self.retry_counts: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        asked = asyncio.create_task(self._pass_requests(reader, up_writer))
        try:
            answer = b""
            while data := await up_reader.read(65536):
                answer += data
                if self._times and self._cut(answer):
                    self._times -= 1
                    writer.transport.abort()
                    return
                if not self._times:
                    writer.write(data)
                    await writer.drain()
        finally:
            asked.cancel()
            up_writer.close()
            writer.close()

    async def _pass_requests(
        self, reader: asyncio.StreamReader, up_writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(65536):
            for line in data.split(b"\r\n"):
                if line.lower().startswith(b"x-stainless-retry-count:"):
                    self.retry_counts.append(line.split(b":")[1].strip().decode())
            up_writer.write(data)
            await up_writer.drain()


@asynccontextmanager
async def cutting(
    base_url: str, cut: Callable[[bytes], bool], times: int = 1
) -> AsyncIterator[tuple[str, CuttingProxy]]:
    proxy = CuttingProxy(int(base_url.split(":")[2].split("/")[0]), cut, times)
    server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1", proxy
    finally:
        server.close()


def needs(client: TrackingClient, ask: Ask) -> None:
    paths = {ask_responses: "/v1/responses", ask_messages: "/v1/messages"}
    if paths.get(ask, "/v1/chat/completions") not in client.gateway._protocols:
        pytest.skip("this protocol is not served")


async def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen within 5 seconds")


@PROTOCOLS
@STREAMED
async def test_a_retry_after_the_record_gets_the_same_answer(
    open_client: Open, ask: Ask, stream: bool
) -> None:
    client = open_client("The answer is forty two.", "another one")
    needs(client, ask)
    base_url = await client.gateway.serve()

    def is_recorded(_: bytes) -> bool:
        return bool(client.interactions)

    async with cutting(base_url, is_recorded) as (url, proxy):
        assert await ask(url, client.session_key, stream) == "The answer is forty two."
    assert proxy.retry_counts == ["0", "1"]
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.COMPLETED
    assert len(client.gateway.engine.prompts) == 1  # type: ignore[attr-defined]


@PROTOCOLS
@STREAMED
async def test_a_retry_after_a_broken_call_is_sampled_and_the_broken_one_is_not_trained(
    open_client: Open, ask: Ask, stream: bool
) -> None:
    client = open_client("The answer is lost.", "The answer is forty two.")
    needs(client, ask)
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 3
    base_url = await client.gateway.serve()
    proxies: list[asyncio.StreamWriter] = []

    async def cut_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Answers nothing: the connection breaks while the reply is being sampled.
        proxies.append(writer)
        port = int(base_url.split(":")[2].split("/")[0])
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()

        tasks = [asyncio.create_task(pass_on(reader, up_writer))]
        if len(proxies) == 1:
            await wait_until(lambda: bool(engine.prompts))
            up_writer.transport.abort()
            await wait_until(lambda: bool(client.interactions))
            engine.gate.set()
            writer.transport.abort()
        else:
            await pass_on(up_reader, writer)
        for task in tasks:
            task.cancel()
        up_writer.close()
        writer.close()

    server = await asyncio.start_server(cut_first, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    assert await ask(url, client.session_key, stream) == "The answer is forty two."
    server.close()
    broken, completed = client.interactions
    assert broken.status is InteractionStatus.CANCELLED
    assert completed.status is InteractionStatus.COMPLETED
    assert completed.parent_id is None
    assert list(client.export_interactions("individual")) == [completed.id]
    assert engine.num_aborted == 1


def post(client: TrackingClient, body: dict[str, Any], **headers: str) -> Any:
    return client.gateway.http_client.post(
        "http://x.invalid/v1/chat/completions",
        content=json.dumps(body),
        headers={"Authorization": f"Bearer {client.session_key}", **headers},
    )


BODY = {"model": "m", "messages": [USER]}


async def test_a_retry_joins_the_call_in_flight_and_keeps_it_alive(open_client: Open) -> None:
    client = open_client("forty two", "never")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    first = asyncio.create_task(post(client, BODY))
    await wait_until(lambda: bool(engine.prompts))
    second = asyncio.create_task(post(client, BODY, **RETRY))
    await asyncio.sleep(0.02)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    engine.gate.set()
    reply = (await second).json()
    assert reply["choices"][0]["message"]["content"] == "forty two"
    [interaction] = client.interactions
    assert (interaction.id, interaction.status) == (reply["id"], InteractionStatus.COMPLETED)
    assert engine.num_aborted == 0


async def test_the_last_reader_that_leaves_cancels_the_call(open_client: Open) -> None:
    client = open_client("forty two")
    engine: Any = client.gateway.engine
    engine.gate = asyncio.Event()
    calls = [asyncio.create_task(post(client, BODY))]
    await wait_until(lambda: bool(engine.prompts))
    calls.append(asyncio.create_task(post(client, BODY, **RETRY)))
    await asyncio.sleep(0.02)
    for call in calls:
        assert client.interactions == ()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.CANCELLED
    assert client.gateway._answers.num_running == 0


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
    book = client.gateway._answers
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
async def test_a_session_that_ends_cancels_its_calls(open_client: Open, stream: bool) -> None:
    client = open_client("forty two")
    engine: Any = client.gateway.engine
    engine.gate, engine.gate_position = asyncio.Event(), 1
    call = asyncio.create_task(post(client, {**BODY, "stream": stream}))
    await wait_until(lambda: bool(engine.prompts))
    await asyncio.sleep(0.02)
    await client.gateway.end_session(client.session)
    [interaction] = client.interactions
    assert interaction.status is InteractionStatus.CANCELLED
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
