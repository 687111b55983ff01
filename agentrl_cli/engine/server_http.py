"""HTTP to one engine server: requests with deadlines, streams, and faults told apart."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import orjson

from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError

Method = Literal["GET", "POST"]

#: uvicorn, which serves vLLM and SGLang, closes connections that were idle for 5 s. One that is
#: about to be closed must not be used again: a request on it would be lost.
_KEEPALIVE_SECONDS = 3.0
#: Servers listen on loopback or in the same network; only a machine that is gone is silent.
_CONNECT_SECONDS = 10.0
#: Of a reply that is shown in a message.
_SHOWN_CHARS = 300
#: The server is there, and says that it cannot serve (vLLM: its engine process died).
_DOWN_STATUSES = frozenset({502, 503, 504})
_REFUSED_STATUSES = frozenset({401, 403})


class HttpStatusError(EngineError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        server_message: what the server said, without our words around it.
    """

    def __init__(self, message: str, status: int, server_message: str) -> None:
        super().__init__(message)
        self.status = status
        self.server_message = server_message


class ServerHttp:
    """Connections to one server, opened on the event loop that first asks for them.

    A connection that is refused, reset or closed before the reply's end raises
    :class:`ServerDownError`; an answer that is an error, :class:`HttpStatusError`.
    """

    def __init__(self, endpoint: ServerEndpoint) -> None:
        self._endpoint = endpoint
        self._base_url = endpoint.base_url.rstrip("/")
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
        timeout_seconds: float | None,
    ) -> bytes:
        """The body of the reply.

        Args:
            method: HTTP method.
            path: with its query, after the base URL.
            body: sent as JSON; None: nothing.
            leg: what the request is for, in the words of an error message.
            timeout_seconds: deadline of the whole; None: the caller keeps one.

        Raises:
            ServerDownError: the connection was refused or lost.
            EngineTimeoutError: the deadline passed.
            HttpStatusError: the server answered with an error.
            EngineError: this client was closed.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                async with self._open(method, path, body, leg) as response:
                    return await response.read()
        except TimeoutError:
            raise self.timed_out(leg, timeout_seconds or 0.0) from None

    async def request_json(
        self,
        method: Method,
        path: str,
        body: object = None,
        *,
        leg: str,
        timeout_seconds: float | None,
    ) -> Any:
        """The reply, parsed; see :meth:`request`.

        Raises:
            EngineError: also if the reply is no JSON.
        """
        reply = await self.request(method, path, body, leg=leg, timeout_seconds=timeout_seconds)
        try:
            return json.loads(reply)
        except ValueError:
            raise EngineError(
                f"{leg}: {self._where} answered with something that is no JSON: {shorten(reply)}"
            ) from None

    async def stream_events(self, path: str, body: object, *, leg: str) -> AsyncGenerator[bytes]:
        """The data of each server-sent event of a POST, up to ``[DONE]``, which is not yielded.

        A JSON reply counts as one event. There is no deadline. Closing the generator closes
        the connection, which tells the server that the reply is no longer wanted.

        Raises:
            ServerDownError: the connection was refused, or lost before ``[DONE]``.
            HttpStatusError: the server answered with an error.
            EngineError: the reply is neither, or this client was closed.
        """
        async with self._open("POST", path, body, leg) as response:
            if response.content_type == "application/json":
                yield await response.read()
                return
            if response.content_type != "text/event-stream":
                start = await response.content.read(_SHOWN_CHARS)
                raise EngineError(
                    f"{leg}: {self._where} answered with {response.content_type} instead of an "
                    f"event stream: {shorten(start)}"
                )
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
                raise self.went_down(leg, "the reply ended before its end mark")

    async def close(self) -> None:
        """Closes the connections; requests in flight get an EngineError. May be called twice."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    def timed_out(self, leg: str, timeout_seconds: float) -> EngineTimeoutError:
        """The error of a deadline that passed, with the end of the server's log."""
        return EngineTimeoutError(
            f"{leg}: {self._where} did not finish within {timeout_seconds:g} s{self._log_tail()}"
        )

    def went_down(self, leg: str, reason: str) -> ServerDownError:
        """The error of a server that is gone."""
        return ServerDownError(f"{leg}: {self._where} is down: {reason}")

    def _log_tail(self) -> str:
        return format_log_tail(self._endpoint.log_path, keys=[self._endpoint.api_key])

    @asynccontextmanager
    async def _open(
        self, method: Method, path: str, body: object, leg: str
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response, its status already looked at; closed at the end unless read whole."""
        try:
            response = await self._send(method, path, body)
            try:
                if response.status != 200:
                    self._raise_status(response.status, await response.read(), leg)
                yield response
            finally:
                # Not release: an unread rest must abort the request in the server.
                response.close()
        except (aiohttp.ClientError, OSError) as error:
            if self._is_closed:
                raise self._closed_error() from None
            reason = str(error) or type(error).__name__
            raise self.went_down(leg, reason) from error

    async def _send(self, method: Method, path: str, body: object) -> aiohttp.ClientResponse:
        data = None if body is None else self._format_body(body)
        url = self._base_url + path
        try:
            return await self._get_session().request(method, url, data=data, allow_redirects=False)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            # An idle connection that the server closed at this very moment: aiohttp repeats only
            # what is idempotent. Everything sent here may be sent twice, and a server that is
            # really gone refuses the second connection.
            return await self._get_session().request(method, url, data=data, allow_redirects=False)

    def _format_body(self, body: object) -> bytes:
        try:
            # For a prompt of 1000 token ids 3 us; json takes 50.
            return orjson.dumps(body)
        except orjson.JSONEncodeError as error:
            # Half of a surrogate pair in a stop text: no token spells it.
            raise EngineError(f"the request to {self._where} is no JSON: {error}") from None

    def _get_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise self._closed_error()
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

    def _closed_error(self) -> EngineError:
        return EngineError(f"the client of {self._where} was closed")

    def _raise_status(self, status: int, body: bytes, leg: str) -> None:
        said = read_error_message(body)
        if status in _DOWN_STATUSES:
            raise self.went_down(leg, f"it answered {status}: {said}")
        if status in _REFUSED_STATUSES:
            raise HttpStatusError(
                f"{leg}: {self._where} refused the key ({status}: {said}). The server was started "
                "with another key than this run's: is a server of another run on that port?",
                status,
                said,
            )
        raise HttpStatusError(f"{leg}: {self._where} answered {status}: {said}", status, said)


def read_error_message(body: bytes) -> str:
    """What the server says in the body of an error: its JSON's message, else the body's start."""
    try:
        reply = json.loads(body)
    except ValueError:
        return shorten(body)
    said = reply
    if isinstance(reply, dict):
        said = reply.get("error", reply.get("detail", reply.get("message")))
        if isinstance(said, dict):
            said = said.get("message")
    return said if isinstance(said, str) and said else shorten(body)


def shorten(body: bytes) -> str:
    """The start of a reply, as it is shown in a message."""
    text = body.decode("utf-8", errors="replace").strip()
    if not text:
        return "(nothing)"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


#: Enough for long lines of a traceback, little enough to read while an event loop waits.
_MAX_BYTES = 16_384


def read_log_tail(path: str | Path | None, *, num_lines: int = 10, keys: Iterable[str] = ()) -> str:
    """The last ``num_lines`` lines of a log file; "" if it is unknown, missing or empty.

    Args:
        path: the file; None: unknown.
        num_lines: most lines to return; empty ones are skipped.
        keys: secrets, replaced by ``***`` wherever they stand.
    """
    if path is None:
        return ""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _MAX_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    for key in keys:
        if key:
            text = text.replace(key, "***")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def format_log_tail(
    path: str | Path | None, *, num_lines: int = 10, keys: Iterable[str] = ()
) -> str:
    """A clause with the log's last lines to append to a message; "" where there are none."""
    tail = read_log_tail(path, num_lines=num_lines, keys=keys)
    if not tail:
        return ""
    indented = "\n".join(f"  {line}" for line in tail.splitlines())
    return f"\nlast lines of {path}:\n{indented}"
