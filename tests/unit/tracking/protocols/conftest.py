"""Anthropic's official SDK on a gateway whose engine follows a script, and an engine that dies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from agentrl_cli.engine.protocol import Generation
from agentrl_cli.errors import EngineError
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.client import TrackingClient

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session, as Anthropic's SDK sees it and as it is recorded."""

    sdk: AsyncAnthropic
    tracking: TrackingClient

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        return self.tracking.interactions

    @property
    def engine(self) -> Any:
        return self.tracking.gateway.engine  # type: ignore[attr-defined]

    async def create(self, *, stream: bool, **options: Any) -> Any:
        """The message, or what the SDK puts together from the stream."""
        options = {"model": "m", "max_tokens": 400, **options}
        if not stream:
            return await self.sdk.messages.create(**options)
        async with self.sdk.messages.stream(**options) as events:
            return await events.get_final_message()


@pytest.fixture
def open_conversation(
    open_client: Callable[..., TrackingClient],
) -> Callable[..., Conversation]:
    """Takes what ``open_client`` takes: ``open_conversation("Hi", "Bye")``."""
    anthropic = pytest.importorskip("anthropic")

    def open_one(*script: Any, **options: Any) -> Conversation:
        tracking = open_client(*script, **options)
        sdk = anthropic.AsyncAnthropic(
            base_url="http://agentrl.invalid",
            api_key=tracking.session_key,
            http_client=tracking.gateway.http_client,
            max_retries=2,
        )
        return Conversation(sdk, tracking)

    return open_one


@pytest.fixture
def read_stream() -> Callable[..., Any]:
    """Sends a raw streamed request: ``await read_stream(conversation, body)`` gives its events."""

    async def read(conversation: Conversation, body: dict[str, Any]) -> list[tuple[str, str]]:
        """The name and the data of every event."""
        response = await conversation.tracking.gateway.http_client.post(
            "http://agentrl.invalid/v1/messages",
            json={"model": "m", "max_tokens": 400, "stream": True, **body},
            headers={"x-api-key": conversation.tracking.session_key},
        )
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = []
        for event in response.text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            events.append((name.removeprefix("event: "), data.removeprefix("data: ")))
        return events

    return read


@pytest.fixture
def let_engine_die(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Has an engine fail after the first token of a stream."""

    async def die(*args: Any, **options: Any) -> AsyncIterator[Generation]:
        yield Generation(
            completion_ids=(80,), rollout_logprobs=(-1.0,), versions=(0,), finish_reason=None
        )
        raise EngineError("the server died")

    return lambda engine: monkeypatch.setattr(engine, "stream", die)
