"""Anthropic's SDK on the tracking client: a stock client whose every call is recorded."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI, OpenAI

from agentrl_cli.blocking_clients import build_blocking_client
from agentrl_cli.errors import MissingExtraError

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic


def build_anthropic_client(client: AsyncOpenAI) -> AsyncAnthropic:
    """Anthropic's client on the session of a tracking client, and on its connection.

    Building one takes a fraction of a millisecond; with a connection of its own it takes 95.

    Args:
        client: the ``client`` that a builder or an agent function is given.

    Raises:
        MissingExtraError: anthropic is not installed.
    """
    built = _load_async_class()(**_list_options(client))
    # Found out already; the SDK would do it at the first call, in another thread.
    built._platform = client._platform
    return built


def build_blocking_anthropic_client(client: AsyncOpenAI) -> Anthropic:
    """A stock ``Anthropic`` on the gateway's socket, for code that blocks.

    Make it on the event loop, use it in other threads.

    Raises:
        MissingExtraError: anthropic is not installed.
    """
    check_anthropic("build_blocking_anthropic_client")
    from anthropic import Anthropic

    return Anthropic(**_list_options(build_blocking_client(client)))


def check_anthropic(asked_by: str) -> None:
    """Refuses to continue without the SDK; importing it takes a second.

    Raises:
        MissingExtraError: anthropic is not installed.
    """
    if importlib.util.find_spec("anthropic") is None:
        raise MissingExtraError(
            f"{asked_by} needs Anthropic's SDK, which is not installed. Type uv pip install "
            "'agentrl-cli[anthropic]'"
        )


def _list_options(client: AsyncOpenAI | OpenAI) -> dict[str, Any]:
    return {
        # The SDK adds /v1 itself.
        "base_url": str(client.base_url).rstrip("/").removesuffix("/v1"),
        "api_key": client.api_key,
        "max_retries": client.max_retries,
        "http_client": client._client,
    }


@cache
def _load_async_class() -> Any:
    """The client's class, made on first use: the SDK is an optional package."""
    check_anthropic("build_anthropic_client")
    from anthropic import AsyncAnthropic

    class TrackedAsyncAnthropic(AsyncAnthropic):
        """Closing it leaves the connection open, which others share."""

        async def close(self) -> None:
            """Does nothing: the tracking client ends the session."""

    return TrackedAsyncAnthropic
