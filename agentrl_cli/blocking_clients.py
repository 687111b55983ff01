"""Clients for code that blocks: made of others, on the same session.

Every process of an agent imports this, so it imports little.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpx2
from openai import AsyncOpenAI, OpenAI

#: Parsed once, and with the slash that the SDK would add to it for every client.
IN_PROCESS_URL = httpx2.URL("http://agentrl.invalid/v1/")
#: Deadline of a blocking call in a session without one.
_MAX_CALL_SECONDS = 3600.0


class BlockingCallError(Exception):
    """A call that blocks where none can be answered, or a client used in the wrong form."""


def build_blocking_client(client: AsyncOpenAI) -> OpenAI:
    """An ``OpenAI`` that reaches what ``client`` reaches, with the same key."""
    # Clients of this package know their own form for code that blocks.
    build = getattr(client, "build_blocking_client", None)
    if build is not None:
        return build()
    return OpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=client.max_retries)


def build_client_pair(client: AsyncOpenAI | OpenAI) -> tuple[OpenAI, Any]:
    """The blocking and the async form of a client, for frameworks that want both.

    An agent function that blocks is given the blocking form; there the async one refuses calls.
    """
    if isinstance(client, AsyncOpenAI):
        return build_blocking_client(client), client
    return client, _BlockingOnly()


class _BlockingOnly:
    """Stands in for the async form where there is none.

    Raises:
        BlockingCallError: on any use.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise BlockingCallError(
            "an async call was made with the client of an agent function that blocks. Call the "
            "form that blocks (CAMEL: step, LangChain: invoke), or write the function as async def"
        )


def build_loopback_http(timeout_seconds: float | None = None) -> httpx2.Client:
    """The connections of a client that blocks to this machine.

    Every request opens one of its own: only at that moment can a client be refused that blocks the
    event loop it waits for. Neither certificates nor the environment's proxies are read, which
    takes 25 ms.
    """
    transport = httpx2.HTTPTransport(
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=False,
    )
    timeout = httpx2.Timeout(timeout_seconds or _MAX_CALL_SECONDS)
    return httpx2.Client(transport=transport, timeout=timeout, trust_env=False)
