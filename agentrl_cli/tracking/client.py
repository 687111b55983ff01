"""The tracking client: a real ``AsyncOpenAI`` (or ``OpenAI``) whose every call is recorded."""

from __future__ import annotations

import asyncio
import functools
import marshal
from collections.abc import Callable
from typing import Any, Self

from openai import AsyncOpenAI, OpenAI
from openai._base_client import get_platform
from openai._utils import maybe_transform
from pydantic import BaseModel

from agentrl_cli.blocking_clients import (
    IN_PROCESS_URL,
    BlockingCallError,
    build_loopback_http,
)
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.records import ExportStyle, Interaction
from agentrl_cli.tracking.credit import TokenSequence
from agentrl_cli.tracking.gateway import BaseGateway, get_gateway
from agentrl_cli.tracking.session import Budget, Session

#: After a session's time every call has been refused: a silence that lasts longer has another
#: cause, such as an event loop that waits for the very thread that asks it.
_GRACE_SECONDS = 60.0


class SessionClient:
    """What tracking clients offer besides the SDK."""

    gateway: BaseGateway
    session: Session

    @property
    def session_key(self) -> str:
        """The secret that opens this session, and no other, at the gateway."""
        return self.session.key

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """All recorded calls, failed ones too, in order of arrival."""
        return self.session.interactions

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Gives one interaction (the ``id`` of a completion) its own reward.

        Raises:
            KeyError: no completed interaction has this id.
            TypeError, ValueError: the reward is no finite number.
        """
        self._change_record(lambda: self.session.set_reward(interaction_id, reward))

    def set_final_reward(self, reward: Any) -> None:
        """Gives the reward to the interaction that ended last.

        Raises:
            ValueError: no call was completed.
        """
        self._change_record(lambda: self.session.set_final_reward(reward))

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Hands credit to earlier turns: own reward + turn_discount x mean over successors."""
        self._change_record(lambda: self.session.apply_reward_discount(turn_discount))

    def export_interactions(self, style: ExportStyle = "concat") -> dict[str, TokenSequence]:
        """Completed interactions by id: every one, or one per merged sequence."""
        return self.session.export_interactions(style)

    def _change_record(self, change: Callable[[], None]) -> None:
        change()

    @functools.cached_property
    def chat(self) -> Any:
        """Chat completions, as the SDK has them."""
        chat = super().chat  # type: ignore[misc]
        _send_as_given(chat.completions, "messages")
        return chat

    @functools.cached_property
    def responses(self) -> Any:
        """Responses, as the SDK has them."""
        responses = super().responses  # type: ignore[misc]
        _send_as_given(responses, "input")
        return responses

    def copy(self, **options: Any) -> Self:
        """A client with other options on the same session."""
        own = {"gateway": self.gateway, "session": self.session}
        options["_extra_kwargs"] = {**options.get("_extra_kwargs", {}), **own}
        return super().copy(**options)  # type: ignore[misc]

    with_options = copy


def _send_as_given(resource: Any, key: str) -> None:
    """Lets the calls of an SDK's resource pass on a conversation that is JSON data already.

    The SDK compares every key of every message with its types on every call: nearly all of its
    time where the conversation is long. What a call adds to the body is not looked at.
    """
    for name in ("create", "parse"):
        method = getattr(resource, name)

        @functools.wraps(method)
        def send(method: Any = method, **options: Any) -> Any:
            items = options.get(key)
            if isinstance(items, list):
                items = [
                    maybe_transform(m, object) if isinstance(m, BaseModel) else m for m in items
                ]
                if _is_plain(items):
                    extra = {key: items, **(options.get("extra_body") or {})}
                    options |= {key: (), "extra_body": extra}
            return method(**options)

        setattr(resource, name, send)


def _is_plain(value: Any) -> bool:
    """Whether a value holds nothing but Python's own plain types."""
    try:
        marshal.dumps(value)
    except ValueError:
        return False
    return True


class TrackingClient(SessionClient, AsyncOpenAI):
    """Works wherever an ``AsyncOpenAI`` does; make one per trajectory.

    Args:
        engine: what samples.
        tokenizer: the model's tokenizer, or the path of one.
        tool_call_parser: how the model writes tool calls; ``auto``: as its chat template does.
        reasoning_parser: how it writes reasoning; likewise.
        keep_reasoning: True: reasoning stays in the history though the chat template strips it.
        sampling: holds where a request does not say otherwise.
        budget: limits of the trajectory.
        gateway: an open gateway, instead of engine and tokenizer.
        session: a session of that gateway to join, instead of a new one.
        openai_options: what ``AsyncOpenAI`` takes besides.
    """

    def __init__(
        self,
        *,
        engine: InferenceEngine | None = None,
        tokenizer: Any = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        keep_reasoning: bool = False,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        gateway: BaseGateway | None = None,
        session: Session | None = None,
        **openai_options: Any,
    ) -> None:
        if gateway is None:
            if engine is None or tokenizer is None:
                raise TypeError("TrackingClient needs engine and tokenizer (or a gateway)")
            if isinstance(tokenizer, str):
                from agentrl_cli.models.model_files import load_tokenizer

                tokenizer = load_tokenizer(tokenizer)
            gateway = get_gateway(
                engine,
                tokenizer,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
                keep_reasoning=keep_reasoning,
            )
        self.gateway = gateway
        self.session = session or gateway.open_session(sampling=sampling, budget=budget)
        options: dict[str, Any] = {"base_url": IN_PROCESS_URL, "max_retries": 0}
        options |= openai_options
        options |= {"api_key": self.session.key, "http_client": gateway.http_client}
        super().__init__(**options)
        # The SDK would find it out at the first call, in another thread: a good part of its cost.
        self._platform = get_platform()

    def build_blocking_client(self) -> BlockingTrackingClient:
        """A client for code that blocks, on the same session."""
        return BlockingTrackingClient(
            gateway=self.gateway, session=self.session, max_retries=self.max_retries
        )

    async def close(self) -> None:
        """Ends the session: its key opens nothing any more, its calls in flight are cancelled.

        Records stay readable.
        """
        await self.gateway.end_session(self.session)


class BlockingTrackingClient(SessionClient, OpenAI):
    """A stock ``OpenAI`` on the gateway's socket, for code that blocks, in a thread of its own.

    It ends with its session, which records the calls; later ones are refused. The gateway's socket
    is opened on first use, in the gateway's event loop.
    """

    def __init__(self, *, gateway: BaseGateway, session: Session, **openai_options: Any) -> None:
        self.gateway = gateway
        self.session = session
        left = session.seconds_left
        options: dict[str, Any] = {
            "base_url": gateway.open_socket(),
            "max_retries": 0,
            "http_client": build_loopback_http(None if left is None else left + _GRACE_SECONDS),
        }
        super().__init__(**(options | openai_options | {"api_key": session.key}))

    def _change_record(self, change: Callable[[], None]) -> None:
        """Changes the record in the gateway's event loop, as only that may.

        Raises:
            BlockingCallError: the trajectory has ended, or the loop is blocked.
        """

        async def run() -> None:
            if self.session.is_closed:
                raise BlockingCallError("the trajectory has ended: no reward is taken any more")
            change()

        if asyncio._get_running_loop() is self.gateway.loop:
            change()
            return
        changing = asyncio.run_coroutine_threadsafe(run(), self.gateway.loop)
        try:
            changing.result(_GRACE_SECONDS)
        except TimeoutError:
            raise BlockingCallError(
                f"no reward was taken for {_GRACE_SECONDS:g} seconds: the event loop that takes it "
                "is blocked, perhaps by code that waits for this thread. Await such code instead: "
                "await asyncio.to_thread(function, ...)"
            ) from None
