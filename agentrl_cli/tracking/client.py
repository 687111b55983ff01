"""The tracking client: a real ``AsyncOpenAI`` whose every call is recorded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
from openai import AsyncOpenAI

from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.records import Interaction
from agentrl_cli.tracking.export import ExportedInteraction
from agentrl_cli.tracking.gateway import BaseGateway, get_gateway
from agentrl_cli.tracking.sdk_platform import SharedPlatform
from agentrl_cli.tracking.sequences import ExportStyle
from agentrl_cli.tracking.session import Budget, Session

#: Parsed once, and with the slash that the SDK would add to it for every client.
IN_PROCESS_URL = httpx2.URL("http://agentrl.invalid/v1/")


class TrackingClient(SharedPlatform, AsyncOpenAI):
    """Works wherever an ``AsyncOpenAI`` does; make one per trajectory.

    Args:
        engine: what samples.
        tokenizer: the model's tokenizer, or the path of one.
        tool_call_parser: how the model writes tool calls; ``auto``: as its chat template does.
        reasoning_parser: how it writes thoughts; likewise.
        keep_thinking: True: thoughts stay in the history though the chat template strips them.
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
        keep_thinking: bool = False,
        sampling: Sampling | None = None,
        budget: Budget | None = None,
        gateway: BaseGateway | None = None,
        session: Session | None = None,
        **openai_options: Any,
    ) -> None:
        if gateway is None:
            if engine is None or tokenizer is None:
                raise TypeError("TrackingClient needs engine and tokenizer (or a gateway)")
            gateway = get_gateway(
                engine,
                _load_tokenizer(tokenizer),
                tool_call_parser,
                reasoning_parser,
                keep_thinking,
            )
        self.gateway = gateway
        self.session = session or gateway.open_session(sampling=sampling, budget=budget)
        self._on_close: list[Callable[[], Awaitable[None]]] = []
        options: dict[str, Any] = {"base_url": IN_PROCESS_URL, "max_retries": 0}
        options |= openai_options
        options |= {"api_key": self.session.key, "http_client": gateway.http_client}
        super().__init__(**options)

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
        self.session.set_reward(interaction_id, reward)

    def set_final_reward(self, reward: Any) -> None:
        """Gives the reward to the interaction that ended last.

        Raises:
            ValueError: no call was completed.
        """
        self.session.set_final_reward(reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Hands credit to earlier turns: own reward + turn_discount x mean over successors."""
        self.session.apply_reward_discount(turn_discount)

    def export_interactions(self, style: ExportStyle = "concat") -> dict[str, ExportedInteraction]:
        """Completed interactions by id: every one, or one per merged sequence."""
        return self.session.export_interactions(style)

    def copy(self, **options: Any) -> TrackingClient:
        """A client with other options on the same session."""
        extra = {**options.pop("_extra_kwargs", {}), "gateway": self.gateway}
        return super().copy(**options, _extra_kwargs={**extra, "session": self.session})

    with_options = copy

    def call_on_close(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Has ``callback`` awaited when the session ends."""
        self._on_close.append(callback)

    async def close(self) -> None:
        """Ends the session: its key opens nothing any more, its calls in flight are cancelled.

        Records stay readable.
        """
        await self.gateway.end_session(self.session)
        for callback in self._on_close:
            await callback()


def _load_tokenizer(tokenizer: Any) -> Any:
    if not isinstance(tokenizer, str):
        return tokenizer
    from agentrl_cli.models.pretrained import load_tokenizer

    return load_tokenizer(tokenizer)
