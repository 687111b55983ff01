"""The client of an agent that runs in a worker: the model by a socket, rewards by the channel."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Any, NoReturn

import httpx2
from openai import AsyncOpenAI, OpenAI

from agentrl_cli.rollout.worker_channel import Channel
from agentrl_cli.tracking.credit import parse_reward

_TRANSPORT: dict[str, Any] = {"limits": httpx2.Limits(max_connections=None)}
_ERRORS: dict[str, type[Exception]] = {"KeyError": KeyError, "ValueError": ValueError}


class RewardLine:
    """Tells the trainer of rewards; what it refuses is raised here. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Refuses what comes after the trajectory: the channel is the next one's then."""
        with self._lock:
            self._is_closed = True

    def tell(self, op: str, **fields: Any) -> None:
        """One message, and the answer to it.

        Raises:
            KeyError, ValueError: as the session raises them.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the trajectory has ended: no reward is taken any more")
            self._channel.send({"op": op, **fields})
            answer = self._channel.receive()
        if answer is None:
            raise RuntimeError("the trainer is gone")
        if answer["op"] != "ok":
            raise _ERRORS.get(answer["error"], RuntimeError)(answer["message"])


class _Rewarding:
    """What a tracking client has besides the SDK, as far as it reaches into another process."""

    _line: RewardLine
    api_key: str

    @property
    def session_key(self) -> str:
        """The secret that opens this session, and no other, at the gateway."""
        return self.api_key

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """Gives one interaction (the ``id`` of a completion) its own reward.

        Raises:
            KeyError: no completed interaction has this id.
            TypeError, ValueError: the reward is no finite number.
        """
        self._line.tell("set_reward", id=interaction_id, reward=parse_reward(reward))

    def set_final_reward(self, reward: Any) -> None:
        """Gives the reward to the interaction that ended last.

        Raises:
            ValueError: no call was completed.
        """
        self._line.tell("set_final_reward", reward=parse_reward(reward))

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        """Hands credit to earlier turns: own reward + turn_discount x mean over successors."""
        self._line.tell("apply_reward_discount", turn_discount=float(turn_discount))

    def export_interactions(self, style: str = "concat") -> NoReturn:
        """Not here: records stay with the trainer.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "records of model calls are kept in the trainer's process, and this agent runs in "
            "another. Type rollout.agent_mode=inline for an agent that reads them"
        )

    @property
    def interactions(self) -> NoReturn:
        """Not here: records stay with the trainer.

        Raises:
            RuntimeError: always.
        """
        self.export_interactions()


class WorkerClient(_Rewarding, AsyncOpenAI):
    """A stock ``AsyncOpenAI`` on one session of the gateway.

    Args:
        line: takes the rewards.
        openai_options: what ``AsyncOpenAI`` takes, ``base_url`` and ``api_key`` among it.
    """

    def __init__(self, *, line: RewardLine, **openai_options: Any) -> None:
        self._line = line
        if openai_options.get("http_client") is None:
            openai_options["http_client"] = httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(**_TRANSPORT, verify=_trust_nobody()),
                timeout=httpx2.Timeout(None),
            )
        self.http_client: httpx2.AsyncClient = openai_options["http_client"]
        super().__init__(**{"max_retries": 0, **openai_options})

    def copy(self, **options: Any) -> WorkerClient:
        """A client with other options on the same session."""
        extra = {**options.pop("_extra_kwargs", {}), "line": self._line}
        return super().copy(**options, _extra_kwargs=extra)

    with_options = copy

    def build_blocking_client(self) -> BlockingWorkerClient:
        """The same for code that blocks."""
        return BlockingWorkerClient(
            line=self._line,
            base_url=self.base_url,
            api_key=self.session_key,
            max_retries=self.max_retries,
        )


class BlockingWorkerClient(_Rewarding, OpenAI):
    """A stock ``OpenAI`` on one session of the gateway, for agents that are not async."""

    def __init__(self, *, line: RewardLine, **openai_options: Any) -> None:
        self._line = line
        if openai_options.get("http_client") is None:
            openai_options["http_client"] = httpx2.Client(
                transport=httpx2.HTTPTransport(**_TRANSPORT, verify=_trust_nobody()),
                timeout=httpx2.Timeout(None),
            )
        self.http_client: httpx2.Client = openai_options["http_client"]
        super().__init__(**{"max_retries": 0, **openai_options})

    def copy(self, **options: Any) -> BlockingWorkerClient:
        """A client with other options on the same session."""
        extra = {**options.pop("_extra_kwargs", {}), "line": self._line}
        return super().copy(**options, _extra_kwargs=extra)

    with_options = copy


def warm_up() -> None:
    """Makes one call to nobody: what the SDK imports and builds on its first call is there then."""
    message = {"role": "assistant", "content": "yes"}
    reply = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }

    async def call() -> None:
        transport = httpx2.MockTransport(lambda _: httpx2.Response(200, json=reply))
        async with httpx2.AsyncClient(transport=transport) as http:
            client = AsyncOpenAI(base_url="http://nobody/v1", api_key="none", http_client=http)
            await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "is anybody there?"}]
            )

    asyncio.run(call())


def _trust_nobody() -> ssl.SSLContext:
    """For plain HTTP to this machine: reading the system's certificates takes 25 ms."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
