"""What strangers without a key may cost a gateway: connections, memory, time, log lines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest

from agentrl_cli.records import StopReason
from agentrl_cli.tracking import gateway_socket
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.gateway_socket import raise_file_limit
from agentrl_cli.tracking.template import ChatTemplate

Open = Callable[..., TrackingClient]
CALL = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
LINE = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.asynccontextmanager
async def connect(
    client: TrackingClient, num: int = 1
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    port = httpx2.URL(await client.gateway.serve()).port
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num)]
    try:
        yield streams
    finally:
        for _, writer in streams:
            writer.close()


async def ask(client: TrackingClient, key: str | None = None, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {key or client.session_key}"}
    url = f"{await client.gateway.serve()}/chat/completions"
    async with httpx2.AsyncClient() as http:
        return await http.post(url, json=body or CALL, headers=headers)


async def read_end(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 5.0)
    return b""


@pytest.mark.parametrize(
    "header", [b"x-long: " + b"a" * 20_000, b"a:b\r\n" * 200], ids=["long", "many lines"]
)
async def test_an_endless_header_is_431(open_client: Open, header: bytes) -> None:
    async with connect(open_client("never")) as [(reader, writer)]:
        writer.write(LINE + header)
        reply = await read_end(reader)
    assert reply.startswith(b"HTTP/1.1 431")
    assert b"may have 16384 bytes in 100 lines" in reply


async def test_who_shows_no_key_in_time_is_hung_up_on(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_socket, "_STRANGER_SECONDS", 0.2)
    client = open_client("a", "b")
    async with connect(client, 3) as streams:
        (_, known), (_, slow), _ = streams
        key = f"authorization: Bearer {client.session_key}\r\n\r\n".encode()
        known.write(LINE + key)
        slow.write(LINE)
        assert await read_end(streams[1][0]) == await read_end(streams[2][0]) == b""
        # Who has shown a key stays, also idle.
        known.write(LINE + key)
        for _ in range(2):
            assert b"200 OK" in await asyncio.wait_for(streams[0][0].readuntil(b'"last_id"'), 5.0)


async def test_a_stranger_gets_one_refusal_and_sends_no_more_than_a_mistake(
    open_client: Open,
) -> None:
    client = open_client("never")
    # A mistyped key is told so, however long the conversation.
    reply = await ask(client, key="mistyped", body={**CALL, "user": "x" * 900_000})
    assert reply.status_code == 401
    async with connect(client, 2) as [(reader, writer), (other, large)]:
        writer.write((LINE + b"\r\n") * 1000)
        assert (await read_end(reader)).count(b"HTTP/1.1") <= 1
        large.write(b"POST /v1/responses HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                large.write(b" " * 2**20)
                await large.drain()
        await read_end(other)
        # What was not sent stays with the sender.
        assert other.at_eof() or large.is_closing()


async def test_the_oldest_of_too_many_strangers_make_room(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_socket, "_MAX_STRANGERS", 8)
    monkeypatch.setattr(gateway_socket, "_GRACE_SECONDS", 0.1)
    client = open_client("hello")
    async with connect(client, 20) as streams:
        ends = await asyncio.gather(*[read_end(reader) for reader, _ in streams[:12]])
        assert ends == [b""] * 12
        assert not any(reader.at_eof() for reader, _ in streams[12:])
        assert (await ask(client)).status_code == 200


async def test_a_client_of_a_slow_event_loop_gets_to_ask_among_strangers(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_socket, "_MAX_STRANGERS", 0)
    monkeypatch.setattr(gateway_socket, "_GRACE_SECONDS", 0.1)
    client = open_client("hello")

    async def slow_down() -> None:
        while True:
            time.sleep(0.05)  # noqa: ASYNC251 - every turn lasts half the grace
            await asyncio.sleep(0)

    await client.gateway.serve()
    slowing = asyncio.ensure_future(slow_down())
    try:
        assert (await ask(client)).status_code == 200
    finally:
        slowing.cancel()


async def test_strangers_write_no_log(
    open_client: Open, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    client = open_client("never")
    caplog.clear()
    upgrade = LINE + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    for sent in (b"\x16\x03\x01\r\n", LINE + b"\r\n" * 9, upgrade):
        async with connect(client) as [(reader, writer)]:
            writer.write(sent)
            await read_end(reader)
    assert caplog.records == []
    assert capfd.readouterr().err == ""


async def test_a_shortage_of_files_is_told_once_and_ends(
    open_client: Open,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    file_limit: Callable[[int], None],
) -> None:
    # Whoever comes in by a file that another closes just then.
    monkeypatch.setattr(gateway_socket, "_STRANGER_SECONDS", 1.0)
    client = open_client("hello")
    port = httpx2.URL(await client.gateway.serve()).port
    blocked = [socket.socket() for _ in range(30)]
    file_limit(max(one.fileno() for one in blocked) + 1)
    held: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for one in blocked:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            one.connect(("127.0.0.1", port))
    loop = asyncio.get_running_loop()
    for one in blocked:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(loop.sock_recv(one, 1), 5.0) == b""
        one.close()
    for number in held:
        os.close(number)
    assert (await ask(client)).status_code == 200
    [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "Too many open files" in record.getMessage()
    assert "Type ulimit -n 65536" in record.getMessage()


def test_the_limit_of_files_is_raised_and_its_shortage_told(
    caplog: pytest.LogCaptureFixture, file_limit: Callable[[int], None]
) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    file_limit(200)
    raise_file_limit(64)
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised == (min(hard, 65_536), hard)
    assert caplog.records == []
    raise_file_limit(100_000)
    assert "Type ulimit -n 400256" in caplog.text
    assert f"rollout.max_concurrent={(raised[0] - 256) // 4}" in caplog.text


async def test_long_texts_are_tokenized_beside_the_event_loop(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client("one", "two", "three", max_model_len=100_000)
    threads: list[tuple[int, bool]] = []
    encode = ChatTemplate._encode_now

    def watch(template: ChatTemplate, text: str) -> tuple[int, ...]:
        threads.append((len(text), threading.current_thread() is threading.main_thread()))
        return encode(template, text)

    monkeypatch.setattr(ChatTemplate, "_encode_now", watch)
    long = "What is the weather? " * 1000
    messages: list[Any] = [{"role": "user", "content": long}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": long}]
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert [here for length, here in threads if length > 20_000] == [False, False]
    assert [here for length, here in threads if length < 1000].count(False) == 0
    first, second, _ = client.interactions
    assert second.extends_parent
    assert list(first.prompt_ids) == list(encode(client.gateway.template, first_text(long)))


def first_text(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


async def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    open_client: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = open_client("hello", max_model_len=50)
    await client.chat.completions.create(**CALL)
    monkeypatch.setattr(ChatTemplate, "_encode_now", None)
    with pytest.raises(openai.BadRequestError, match=r"at least \d+ tokens and engine"):
        await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a " * 2**20}]
        )
    assert client.session.stop_reason is StopReason.MAX_MODEL_LEN
