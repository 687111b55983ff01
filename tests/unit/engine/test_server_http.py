"""Requests to a server that fails in every way a server can, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.server_http import ServerHttp, format_log_tail, read_error_message
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerBusyError, ServerDownError

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

KEY = "sk-the-secret-key"
EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Head and body of one request; an empty head where the client left."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    except asyncio.IncompleteReadError:
        return "", b""
    length = head.partition("content-length: ")[2].partition("\r\n")[0]
    return head, await reader.readexactly(int(length or 0))


def make_reply(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer_with(*replies: bytes, then_close: bool = False) -> Answer:
    """Answers each request of a connection with the next reply."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for reply in replies:
            head, _ = await read_request(reader)
            if not head:
                return
            writer.write(reply)
            await writer.drain()
        if not then_close:
            await reader.read()

    return answer


@asynccontextmanager
async def serve(answer: Answer, log_path: str | None = None) -> AsyncIterator[ServerHttp]:
    """A client of a server that treats every connection by ``answer``."""

    async def treat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(treat, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    http = ServerHttp(
        ServerEndpoint(
            name="vllm-0", base_url=f"http://127.0.0.1:{port}", api_key=KEY, log_path=log_path
        )
    )
    try:
        yield http
    finally:
        await http.close()
        server.close()


async def ask(http: ServerHttp, timeout_seconds: float = 5.0, **body: object) -> bytes:
    return await http.request("POST", "/x", body, leg="the test", timeout_seconds=timeout_seconds)


async def collect(http: ServerHttp, seen: list[bytes] | None = None) -> list[bytes]:
    """All events; ``seen`` has those that came before an error."""
    seen = [] if seen is None else seen
    async with aclosing(http.stream_events("/x", {}, leg="the test")) as events:
        async for event in events:
            seen.append(event)
    return seen


async def test_a_request_carries_key_and_body() -> None:
    seen: list[tuple[str, bytes]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(make_reply(b'{"b": 2}'))

    async with serve(answer) as http:
        assert await ask(http, a=1) == b'{"b": 2}'
    head, body = seen[0]
    assert head.startswith("post /x http/1.1")
    assert f"authorization: bearer {KEY}" in head
    assert json.loads(body) == {"a": 1}


async def test_a_text_that_no_json_can_carry_is_refused_before_it_is_sent() -> None:
    async with serve(answer_with(make_reply(b"{}"))) as http:
        with pytest.raises(EngineError, match=r"the request to vllm-0 .* is no JSON: .*surrogate"):
            await ask(http, stop=["\ud83d"])


async def test_a_refused_connection_means_a_server_that_is_down() -> None:
    async with serve(answer_with()) as http:
        pass
    gone = ServerHttp(http._endpoint)
    with pytest.raises(ServerDownError, match=r"the test: vllm-0 \(http://127.0.0.1:\d+\) is down"):
        await ask(gone)
    with pytest.raises(ServerDownError, match="is down"):
        await collect(gone)
    await gone.close()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"", "disconnected"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{", "vllm-0"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n", "vllm-0"),
        (make_reply(b"", "503 Service Unavailable"), "503"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "vllm-0"),
    ],
    ids=["no answer", "half a body", "half a chunked body", "unavailable", "no HTTP"],
)
async def test_a_server_without_a_whole_reply_is_down(reply: bytes, said: str) -> None:
    async with serve(answer_with(reply, then_close=True)) as http:
        with pytest.raises(ServerDownError, match=said):
            await ask(http)


@pytest.mark.parametrize(
    ("reply", "seen_before"),
    [
        (EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n", [b"one"]),
        # Ended in order, as a server does that is asked to stop.
        (EVENT_STREAM + b"content-length: 11\r\n\r\ndata: one\n\n", [b"one"]),
        (EVENT_STREAM + b"content-length: 0\r\n\r\n", []),
    ],
)
async def test_a_stream_without_its_end_mark_means_a_server_that_is_down(
    reply: bytes, seen_before: list[bytes]
) -> None:
    seen: list[bytes] = []
    async with serve(answer_with(reply, then_close=True)) as http:
        with pytest.raises(ServerDownError):
            await collect(http, seen)
    assert seen == seen_before


async def test_a_stream_is_cut_into_events_wherever_its_chunks_end() -> None:
    long = b"x" * 300_000
    text = b": comment\n\ndata: one\r\n\r\ndata:two\n\nevent: y\ndata: " + long + b"\n\n"
    text += b"data: [DONE]\n\ndata: after the end\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\n")
        for start in (*range(0, 60), 60, 61_000, len(text)):
            end = start + 1 if start < 60 else {60: 61_000, 61_000: len(text)}.get(start, start)
            part = text[start:end]
            if part:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                await writer.drain()
                await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    async with serve(answer) as http:
        assert await collect(http) == [b"one", b"two", long]


async def test_a_hanging_server_names_leg_server_and_the_end_of_its_log(tmp_path: Path) -> None:
    log = tmp_path / "vllm-0.log"
    log.write_text("\n".join([*(f"line {i}" for i in range(20)), f"loaded with {KEY}", ""]))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve(answer, str(log)) as http:
        with pytest.raises(EngineTimeoutError) as caught:
            await ask(http, 0.1)
    message = str(caught.value)
    assert message.startswith("the test: vllm-0 (http://127.0.0.1:")
    assert "within 0.1 s" in message
    assert "line 19" in message
    assert "line 5\n" not in message
    assert KEY not in message
    assert "loaded with ***" in message


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b'{"error": {"message": "too hot", "code": 400}}', "400 Bad Request", "400: too hot"),
        (b'{"error": "Unauthorized"}', "401 Unauthorized", r"refused the key .*another key"),
        (b"<html>a proxy</html>" + b"y" * 1000, "404 Not Found", "404: <html>a proxy"),
    ],
)
async def test_an_error_of_the_server_is_told_in_its_own_words(
    body: bytes, status: str, said: str
) -> None:
    reply = make_reply(body, status)
    async with serve(answer_with(reply, then_close=True)) as http:
        for call in (ask(http), collect(http)):
            with pytest.raises(EngineError, match=said) as caught:
                await call
            assert not isinstance(caught.value, ServerDownError)
            assert KEY not in str(caught.value)
            assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("status", "is_rate_limit"),
    [("429 Too Many Requests", True), ("500 Internal Server Error", False)],
)
async def test_a_busy_server_may_be_asked_again(status: str, is_rate_limit: bool) -> None:
    reply = make_reply(b'{"error": {"message": "later"}}', status)
    async with serve(answer_with(reply, then_close=True)) as http:
        for call in (ask(http), collect(http)):
            with pytest.raises(ServerBusyError, match=f"{status[:3]}: later") as caught:
                await call
            assert caught.value.is_rate_limit == is_rate_limit


async def test_a_connection_is_used_again_and_one_that_went_stale_is_no_dead_server() -> None:
    """uvicorn closes idle connections; a request may be on its way at that very moment."""
    num_connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        for _ in range(2):
            await read_request(reader)
            writer.write(make_reply(b"1"))
        # Its third request is read by nobody.

    async with serve(answer) as http:
        assert [await ask(http) for _ in range(6)] == [b"1"] * 6
    assert num_connections == 3


async def test_a_stream_read_to_its_end_leaves_its_connection_to_the_next() -> None:
    connections = 0
    reply = EVENT_STREAM + b"content-length: 25\r\n\r\ndata: one\n\ndata: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answer_with(reply, reply, reply)(reader, writer)

    async with serve(answer) as http:
        for _ in range(3):
            assert await collect(http) == [b"one"]
    assert connections == 1


async def test_a_reply_that_is_not_streamed_is_one_event() -> None:
    reply = make_reply(b'{"a": 1}\n')
    async with serve(answer_with(reply)) as http:
        assert await collect(http) == [b'{"a": 1}\n']
    async with serve(answer_with(reply[:-1], then_close=True)) as http:
        with pytest.raises(ServerDownError):
            await collect(http)


@pytest.mark.parametrize("leave", ["break", "cancel"])
async def test_leaving_a_stream_closes_its_connection(leave: str) -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(EVENT_STREAM + b"transfer-encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n")
        assert await reader.read() == b""
        left.set()

    async with serve(answer) as http:
        if leave == "break":
            async with aclosing(http.stream_events("/x", {}, leg="the test")) as events:
                assert await anext(events) == b"one"
        else:
            task = asyncio.create_task(collect(http))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(2):
            await left.wait()


async def test_closing_the_client_ends_its_requests() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve(answer) as http:
        task = asyncio.create_task(ask(http))
        await asyncio.sleep(0.05)
        await http.close()
        await http.close()
        for call in (task, ask(http)):
            with pytest.raises(EngineError, match=r"vllm-0"):
                await call


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"message": "m", "object": "error"}', "m"),
        (b'{"error": {"code": 1}}', '{"error": {"code": 1}}'),
        (b"[1]", "[1]"),
        (b"Internal Server Error", "Internal Server Error"),
        (b"\xff", "�"),
        (b"", "(nothing)"),
    ],
)
def test_the_message_is_found_in_every_form_of_error(body: bytes, expected: str) -> None:
    assert read_error_message(body) == expected


def find_tail(path: Path) -> str:
    return format_log_tail(path, keys=[KEY])


def test_the_last_lines_are_shown_without_empty_ones_and_keys(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    assert find_tail(log) == find_tail(tmp_path) == ""
    log.write_text(f"one\n\ntwo {KEY}  \n\nthree\n\n")
    assert find_tail(log) == f"\nlast lines of {log}:\n  one\n  two ***\n  three"
    # A long one is not read whole.
    log.write_bytes(b"x" * 10_000_000 + b"\xff\n\xc3\xa4 end\n")
    assert find_tail(log).endswith("\n  ä end")
    assert len(find_tail(log)) < 20_000
