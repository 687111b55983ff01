"""HTTP to one engine server: requests with deadlines, streams, and faults told apart."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerBusyError, ServerDownError

Method = Literal["GET", "POST"]

#: uvicorn, which serves vLLM and SGLang, closes connections that were idle for 5 s. One that is
#: about to be closed must not be used again: a request on it would be lost.
_KEEPALIVE_SECONDS = 3.0
#: Servers listen on loopback or in the same network; only a machine that is gone is silent.
_CONNECT_SECONDS = 10.0
#: Of a reply that is shown in a message.
_SHOWN_CHARS = 300
#: The server is there, and says that it cannot serve.
_DOWN_STATUSES = frozenset({502, 503, 504})
_TOO_MANY_REQUESTS, _INTERNAL_ERROR = 429, 500
#: How vLLM says that its process that computes is gone; the one that answers ends soon after.
_ENGINE_DEAD = "EngineCore encountered an issue"
#: Of a log: enough for long lines of a traceback, little enough to read while an event loop waits.
_MAX_TAIL_BYTES = 16_384
_NUM_TAIL_LINES = 15


class ServerHttp:
    """Connections to one server, opened on the event loop that first asks for them.

    Everything raises:
        ServerDownError: the connection was refused, reset or closed before the reply's end, or
            the server says that it cannot serve.
        ServerBusyError: the server has too much to do, or made an error of its own.
        EngineError: the server answered with another error (shown), or this client was closed.
    """

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self._endpoint = endpoint
        self._where = f"{endpoint.name} ({endpoint.base_url})"
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def request(
        self,
        method: Method,
        path: str,
        body: object = None,
        *,
        leg: str,
        timeout_seconds: float,
    ) -> bytes:
        """The body of the reply.

        Args:
            method: HTTP method.
            path: with its query, after the base URL.
            body: sent as JSON; None: nothing.
            leg: what the request is for, in the words of an error message.
            timeout_seconds: deadline of the whole.

        Raises:
            EngineTimeoutError: the deadline passed; shows the end of the server's log.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                async with self._open(method, path, body, leg) as response:
                    return await response.read()
        except TimeoutError:
            raise EngineTimeoutError(
                f"{leg}: {self._where} did not finish within {timeout_seconds:g} s"
                + format_log_tail(self._endpoint.log_path, keys=[self._endpoint.api_key])
            ) from None

    async def stream_events(self, path: str, body: object, *, leg: str) -> AsyncGenerator[bytes]:
        """The data of each server-sent event of a POST, up to ``[DONE]``, which is not yielded.

        A JSON reply counts as one event. There is no deadline. Closing the generator closes
        the connection, which tells the server that the reply is no longer wanted.
        """
        async with self._open("POST", path, body, leg) as response:
            if response.content_type == "application/json":
                yield await response.read()
                return
            is_done, rest = False, b""
            # Chunks and not lines: aiohttp limits the length of a line.
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    # Read on after it: a connection that is read to its end is used again.
                    is_done = is_done or data == b"[DONE]"
                    if not is_done:
                        yield data
            if not is_done:
                raise ServerDownError(f"{leg}: {self._where}: the reply ended before its end mark")

    async def close(self) -> None:
        """Closes the connections; requests in flight get an EngineError. May be called twice."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    def build_error(self, leg: str, said: str, status: object = None) -> EngineError:
        """The error for what the server says went wrong, with what status of HTTP's."""
        message = f"{leg}: {self._where} answered {said}"
        if _ENGINE_DEAD in said:
            return ServerDownError(message)
        if status in (_TOO_MANY_REQUESTS, _INTERNAL_ERROR):
            return ServerBusyError(message, is_rate_limit=status == _TOO_MANY_REQUESTS)
        return EngineError(message)

    @asynccontextmanager
    async def _open(
        self, method: Method, path: str, body: object, leg: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, its status already looked at; closed at the end unless read whole."""
        try:
            # For a prompt of 1000 token ids 3 us; json takes 50.
            data = None if body is None else orjson.dumps(body)
        except orjson.JSONEncodeError as error:
            # Half of a surrogate pair in a stop text: no token spells it.
            raise EngineError(f"the request to {self._where} is no JSON: {error}") from None
        try:
            response = await self._send(method, path, data)
            try:
                if response.status != 200:
                    self._raise_status(response.status, await response.read(), leg)
                yield response
            finally:
                # Not release: an unread rest must abort the request in the server.
                response.close()
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise ServerDownError(f"{leg}: {self._where} is down: {reason}") from error

    async def _send(self, method: Method, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        url = self._endpoint.base_url + path
        try:
            return await self._get_session().request(method, url, data=data, allow_redirects=False)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # An idle connection that the server closed at this very moment: aiohttp repeats only
            # what is idempotent. Everything sent here may be sent twice, and a server that is
            # really gone refuses the second connection.
            return await self._get_session().request(method, url, data=data, allow_redirects=False)

    def _get_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise EngineError(f"the client of {self._where} was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                headers={
                    "Authorization": f"Bearer {self._endpoint.api_key}",
                    "Content-Type": "application/json",
                    "Accept-Encoding": "identity",
                },
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    def _raise_status(self, status: int, body: bytes, leg: str) -> None:
        said = f"{status}: {read_error_message(body)}"
        if status in _DOWN_STATUSES:
            raise ServerDownError(f"{leg}: {self._where} is down: it answered {said}")
        if status in (401, 403):
            raise EngineError(
                f"{leg}: {self._where} refused the key ({said}). The server was started with "
                "another key than this run's: is a server of another run on that port?"
            )
        raise self.build_error(leg, said, status)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a reply; an empty one where the reply is something else."""
    try:
        # For 300 tokens with their logprobs 58 us; json takes 153.
        reply = orjson.loads(body)
    except ValueError:
        return {}
    return reply if isinstance(reply, dict) else {}


def read_error_message(body: bytes) -> str:
    """What the server says in the body of an error: its JSON's message, else the body's start."""
    said: object = parse_object(body)
    for key in ("error", "detail", "message", "error_message"):
        if isinstance(said, dict):
            said = said.get(key) or said
    return said if isinstance(said, str) else shorten(body)


def shorten(body: bytes) -> str:
    """The start of a reply, as it is shown in a message."""
    text = body.decode("utf-8", errors="replace").strip()
    if not text:
        return "(nothing)"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def format_log_tail(path: str | Path | None, *, keys: Iterable[str] = ()) -> str:
    """A clause with the last lines of a log, without the ``keys``; "" if there are none."""
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    for key in keys:
        text = text.replace(key, "***")
    shown = [f"\n  {line.rstrip()}" for line in text.splitlines() if line.strip()]
    return f"\nlast lines of {path}:{''.join(shown[-_NUM_TAIL_LINES:])}" if shown else ""
