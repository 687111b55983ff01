"""HTTP into an app of the same event loop: whole, streamed, cancelled and broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from agentrl_cli.tracking.transport import InProcessTransport


def open_http(app: Callable[..., Any]) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(transport=InProcessTransport(app), base_url="http://app.invalid")


async def respond(send: Any, *pieces: bytes, status: int = 200) -> None:
    headers = [(b"content-type", b"text/plain"), (b"x-one", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for number, piece in enumerate(pieces):
        more = number < len(pieces) - 1
        await send({"type": "http.response.body", "body": piece, "more_body": more})


async def test_a_whole_answer_is_made_in_the_callers_task() -> None:
    tasks: list[Any] = []
    received: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.current_task())
        received.append((await receive())["body"])
        assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/x", b"q=1")
        assert (b"authorization", b"Bearer k") in scope["headers"]
        await respond(send, b"one ", b"two", status=418)

    async with open_http(app) as http:
        headers = {"Authorization": "Bearer k"}
        response = await http.post("/v1/x?q=1", json={"stream": False}, headers=headers)
    assert (response.status_code, response.text, response.headers["x-one"]) == (418, "one two", "1")
    assert tasks == [asyncio.current_task()]
    assert json.loads(received[0]) == {"stream": False}


@pytest.mark.parametrize("spelled", ['{"stream":true}', '{"a": 1, "stream" : true}'])
async def test_a_stream_arrives_as_it_is_made(spelled: str) -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    async with (
        open_http(app) as http,
        http.stream("POST", "/", content=spelled) as response,
    ):
        pieces = response.aiter_bytes()
        assert await anext(pieces) == b"one"
        go_on.set()
        assert await anext(pieces) == b"two"


@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_a_caller_that_is_cancelled_cancels_the_app(body: dict[str, Any]) -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope, send
        await receive()
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with open_http(app) as http:
        call = asyncio.create_task(http.post("/", json=body))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert cancelled.is_set()


@pytest.mark.parametrize("body", [{}, {"stream": True}])
async def test_an_app_without_a_response_is_an_error(body: dict[str, Any]) -> None:
    async def silent(scope: Any, receive: Any, send: Any) -> None:
        """Ends without a word."""

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise ZeroDivisionError("in the app")

    async with open_http(silent) as http:
        with pytest.raises(RuntimeError, match="without a response"):
            await http.post("/", json=body)
    async with open_http(broken) as http:
        with pytest.raises(ZeroDivisionError, match="in the app"):
            await http.post("/", json=body)


async def test_nothing_is_told_of_a_disconnect_before_the_answer() -> None:
    """What waits for a hang-up meanwhile does not see one."""
    watched: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        del scope
        await receive()
        watching = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await respond(send, b"done")
        watched.append(watching.done())
        watching.cancel()

    async with open_http(app) as http:
        assert (await http.post("/", json={})).text == "done"
    assert watched == [False]
