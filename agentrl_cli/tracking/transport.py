"""HTTP to a gateway in the same event loop, without a socket, with true streaming."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping
from typing import Protocol

import httpx2

from agentrl_cli.tracking.replay import Reply, ReplyStream


class Responder(Protocol):
    """What replies to requests, as a gateway does."""

    async def respond(
        self, method: str, path: str, headers: Mapping[str, str], body: AsyncIterable[bytes]
    ) -> Reply:
        """The reply to one request."""
        ...


class SharedClient(httpx2.AsyncClient):
    """The way into a gateway in this process, for any number of SDK clients.

    SDKs close the client that they are given when they are closed; this one stays open for
    the others until :meth:`end`.
    """

    def __init__(self, gateway: Responder) -> None:
        super().__init__(transport=InProcessTransport(gateway), timeout=httpx2.Timeout(None))

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
    """Hands requests to a gateway; closing a response early cancels its call."""

    def __init__(self, gateway: Responder) -> None:
        self._gateway = gateway

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Waits until the response begins; its body streams as it is made."""
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        reply = await self._gateway.respond(
            request.method, request.url.path, request.headers, request.stream
        )
        stream = ReplyStream(reply)
        try:
            await stream.wait_for_news()
        except BaseException:
            await stream.aclose()
            raise
        if not reply.has_ended:
            return httpx2.Response(reply.status, headers=reply.headers, stream=stream)
        # Most replies are complete by now: read at once they take a tenth less time.
        body = stream.read()
        await stream.aclose()
        return httpx2.Response(reply.status, headers=reply.headers, content=body)
