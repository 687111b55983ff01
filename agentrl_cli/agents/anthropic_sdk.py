"""Anthropic's SDK on the tracking client: a stock client whose every call is recorded."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

from openai import AsyncOpenAI

from agentrl_cli.errors import MissingExtraError
from agentrl_cli.tracking.blocking_client import build_blocking_client
from agentrl_cli.tracking.sdk_platform import SharedPlatform

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
    return _load_classes()[0](**_list_options(client))


def build_blocking_anthropic_client(client: AsyncOpenAI) -> Anthropic:
    """The same for code that blocks; make it on the event loop, use it in other threads.

    Raises:
        MissingExtraError: anthropic is not installed.
    """
    return _load_classes()[1](**_list_options(client, build_blocking_client(client)))


def check_anthropic(asked_by: str) -> None:
    """Refuses to go on without the SDK; importing it takes a second.

    Raises:
        MissingExtraError: anthropic is not installed.
    """
    if importlib.util.find_spec("anthropic") is None:
        raise MissingExtraError(
            f"{asked_by} needs Anthropic's SDK, which is not installed. Type uv pip install "
            "'agentrl[anthropic]'"
        )


def _list_options(client: AsyncOpenAI, connected: Any = None) -> dict[str, Any]:
    return {
        # The SDK adds /v1 itself.
        "base_url": str(client.base_url).rstrip("/").removesuffix("/v1"),
        "api_key": client.api_key,
        "max_retries": client.max_retries,
        "http_client": (connected or client)._client,
    }


@cache
def _load_classes() -> tuple[Any, Any]:
    """The classes of both clients, made on first use: the SDK is an optional package."""
    check_anthropic("build_anthropic_client")
    from anthropic import Anthropic, AsyncAnthropic

    class TrackedAsyncAnthropic(SharedPlatform, AsyncAnthropic):
        """Closing it leaves the connection open, which others share."""

        async def close(self) -> None:
            """Does nothing: the tracking client ends the session."""

    class TrackedAnthropic(Anthropic):
        """Closing it leaves the connection open, which others share."""

        def close(self) -> None:
            """Does nothing: the tracking client ends the session."""

    return TrackedAsyncAnthropic, TrackedAnthropic
