"""HTTP to an ASGI app in the same event loop, without a socket, with true streaming.

httpx2's own ASGI transport hands over a response when the app has ended, so that a
streamed reply would arrive in one piece and a client could not hang up.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx2

_Message = MutableMapping[str, Any]
_App = Callable[
    [
        MutableMapping[str, Any],
        Callable[[], Awaitable[_Message]],
        Callable[[_Message], Awaitable[None]],
    ],
    Awaitable[None],
]
#: Under ``extensions`` of a request: who hangs up cancels the app's task, so that an app that only
#: waits to hear of it has nothing to wait for.
CANCELS_ON_HANG_UP = "agentrl.cancels_on_hang_up"
_EXTENSIONS: dict[str, dict[str, Any]] = {CANCELS_ON_HANG_UP: {}}
#: A text that says the same has its quotes escaped; should it match all the same, no harm is done.
_ASKS_FOR_STREAM = re.compile(rb'"stream"\s*:\s*true')


class SharedClient(httpx2.AsyncClient):
    """The way into an app in this process, for any number of SDK clients.

    SDKs close the client that they are given when they are closed; this one stays open for
    the others until :meth:`end`.
    """

    def __init__(self, app: _App) -> None:
        super().__init__(transport=InProcessTransport(app), timeout=httpx2.Timeout(None))

    async def aclose(self) -> None:
        """Does nothing: others may still use the client."""

    async def __aenter__(self) -> SharedClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing: others may still use the client."""

    async def end(self) -> None:
        """Closes it for all."""
        await super().aclose()


class InProcessTransport(httpx2.AsyncBaseTransport):
    """Sends requests straight into ``app``; closing a response early cancels its call."""

    def __init__(self, app: _App) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Runs the app until its response begins; the body streams as it is made.

        Where no stream was asked for, the app runs in the caller's own task, and its response
        is returned whole: a task and its queue for each call cost a tenth of the gateway's time.
        """
        body = await request.aread()
        if _ASKS_FOR_STREAM.search(body) is None:
            return await _answer_whole(self._app, request, body)
        exchange = _Exchange(self._app, request, body)
        try:
            status, headers = await exchange.start()
        except BaseException:
            await exchange.aclose()
            raise
        return httpx2.Response(status, headers=headers, stream=exchange)


async def _answer_whole(app: _App, request: httpx2.Request, body: bytes) -> httpx2.Response:
    """The app's response when it has ended; a caller that is cancelled cancels the app."""
    unread: list[bytes] = [body]
    head: _Message = {}
    pieces: list[bytes] = []

    async def receive() -> _Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        # A client that hangs up cancels this task: there is nothing to be told of it.
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    async def send(message: _Message) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            pieces.append(message.get("body", b""))

    await app(_build_scope(request), receive, send)
    if not head:
        raise RuntimeError("the app ended without a response")
    headers = list(head.get("headers", ()))
    return httpx2.Response(head["status"], headers=headers, content=b"".join(pieces))


class _Exchange(httpx2.AsyncByteStream):
    """One request and its response, the app running in a task of its own."""

    def __init__(self, app: _App, request: httpx2.Request, body: bytes) -> None:
        self._messages: asyncio.Queue[_Message | None] = asyncio.Queue()
        self._body: bytes | None = body
        self._hung_up = asyncio.Event()
        self._task = asyncio.create_task(self._run(app, _build_scope(request)))

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers, when the app has sent them."""
        message = await self._messages.get()
        if message is None:
            await self._task
            raise RuntimeError("the app ended without a response")
        return message["status"], list(message.get("headers", ()))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._messages.get()) is not None:
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                break
        await self._task

    async def aclose(self) -> None:
        """Hangs up: the app sees a disconnect, and is cancelled if it still runs."""
        self._hung_up.set()
        if not self._task.done():
            self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self._task

    async def _run(self, app: _App, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._messages.put_nowait(None)

    async def _receive(self) -> _Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._hung_up.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: _Message) -> None:
        self._messages.put_nowait(message)


def _build_scope(request: httpx2.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 0),
        "root_path": "",
        "extensions": _EXTENSIONS,
    }
