"""The tracking client for code that blocks: an ``OpenAI`` to be called from a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import Any, Protocol, TypeVar, runtime_checkable

import httpx2
from openai import AsyncOpenAI, OpenAI

from agentrl_cli.records import Interaction
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.transport import InProcessTransport

ResultT = TypeVar("ResultT")

#: How long calls in flight may take to end when they are cancelled.
_CANCEL_SECONDS = 5.0


class BlockingCallError(Exception):
    """A blocking call that cannot be answered: made on the event loop, or after the end."""


class _Bridge:
    """Runs coroutines on an event loop for threads that wait for them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    def check_thread(self) -> None:
        """Refuses to wait on the thread that would have to do the work.

        Raises:
            BlockingCallError: this is the event loop's own thread.
        """
        if threading.get_ident() == self._loop_thread:
            raise BlockingCallError(
                "a blocking call was made on the event loop that has to answer it, so it would "
                "wait for ever. In async code, await the async form (CAMEL: astep, LangChain: "
                "ainvoke, OpenAI: AsyncOpenAI), or move the call into a thread: "
                "await asyncio.to_thread(function, ...)"
            )

    def wait(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What the coroutine returns; raises what it raises.

        Raises:
            BlockingCallError: called on the event loop, or the trajectory has ended.
        """
        try:
            self.check_thread()
            future = asyncio.run_coroutine_threadsafe(self._run(work), self._loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise BlockingCallError("the trajectory ended while this call ran") from None

    async def close(self) -> None:
        """Refuses new calls, and returns when those in flight were cancelled."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_SECONDS)

    async def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        if self._closed:
            work.close()
            raise BlockingCallError("the trajectory has ended: no call is answered")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await work
        finally:
            self._running.discard(task)


class _BlockingTransport(httpx2.BaseTransport):
    """The in-process way to the gateway, for blocking clients in other threads."""

    def __init__(self, bridge: _Bridge, transport: InProcessTransport) -> None:
        self._bridge = bridge
        self._transport = transport

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Waits until the response begins; its body streams as it is made."""
        request.read()
        response = self._bridge.wait(self._transport.handle_async_request(request))
        body = response.stream
        assert isinstance(body, httpx2.AsyncByteStream)
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=_BlockingBody(self._bridge, body)
        )


class _BlockingBody(httpx2.SyncByteStream):
    """A response's body, piece by piece."""

    def __init__(self, bridge: _Bridge, body: httpx2.AsyncByteStream) -> None:
        self._bridge = bridge
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        pieces = aiter(self._body)

        async def take() -> bytes | None:
            return await anext(pieces, None)

        while (piece := self._bridge.wait(take())) is not None:
            yield piece

    def close(self) -> None:
        self._bridge.wait(self._body.aclose())


class BlockingTrackingClient(OpenAI):
    """A stock ``OpenAI`` on the session of a tracking client.

    Make it on the event loop, use it in other threads. It ends with the tracking client:
    calls in flight are cancelled then, and later ones refused.

    Args:
        client: whose session it is.
        original: the client that this is a copy of.
        openai_options: what ``OpenAI`` takes besides.

    Raises:
        RuntimeError: made where no event loop runs.
    """

    def __init__(
        self,
        client: TrackingClient,
        *,
        original: BlockingTrackingClient | None = None,
        **openai_options: Any,
    ) -> None:
        self._tracking = client
        options: dict[str, Any] = {
            "base_url": client.base_url,
            "max_retries": client.max_retries,
            **openai_options,
            "api_key": client.session_key,
        }
        if original is None:
            self._bridge = _Bridge(asyncio.get_running_loop())
            client.call_on_close(self._bridge.close)
            transport = _BlockingTransport(self._bridge, InProcessTransport(client.gateway.app))
            # Without the environment's proxies, which cost ten times the rest.
            options["http_client"] = httpx2.Client(
                transport=transport, timeout=httpx2.Timeout(None), trust_env=False
            )
        else:
            self._bridge = original._bridge
            options["http_client"] = original.http_client
        super().__init__(**options)

    @property
    def http_client(self) -> httpx2.Client:
        """For clients of other make: reaches the gateway without a socket."""
        assert isinstance(self._client, httpx2.Client)
        return self._client

    @property
    def session_key(self) -> str:
        """The secret that opens this session, and no other, at the gateway."""
        return self._tracking.session_key

    @property
    def interactions(self) -> tuple[Interaction, ...]:
        """All recorded calls, failed ones too, in order of arrival."""
        return self._on_loop(lambda: self._tracking.interactions)

    def set_reward(self, interaction_id: str, reward: Any) -> None:
        """As :meth:`TrackingClient.set_reward`."""
        self._on_loop(lambda: self._tracking.set_reward(interaction_id, reward))

    def set_final_reward(self, reward: Any) -> None:
        """As :meth:`TrackingClient.set_final_reward`."""
        self._on_loop(lambda: self._tracking.set_final_reward(reward))

    def copy(self, **options: Any) -> BlockingTrackingClient:
        """A client with other options on the same session."""
        extra = {**options.pop("_extra_kwargs", {}), "client": self._tracking, "original": self}
        return super().copy(**options, _extra_kwargs=extra)

    with_options = copy

    def request(self, *args: Any, **kwargs: Any) -> Any:
        """One request.

        Raises:
            BlockingCallError: made on the event loop's own thread. Raised here, where the SDK
                does not yet take it for a broken connection.
        """
        self._bridge.check_thread()
        return super().request(*args, **kwargs)

    def _on_loop(self, function: Callable[[], ResultT]) -> ResultT:
        async def call() -> ResultT:
            return function()

        return self._bridge.wait(call())


@runtime_checkable
class HasBlockingForm(Protocol):
    """A client that knows its own form for code that blocks."""

    def build_blocking_client(self) -> OpenAI:
        """That form."""
        ...


def build_blocking_client(client: AsyncOpenAI) -> OpenAI:
    """An ``OpenAI`` that reaches what ``client`` reaches, with the same key."""
    if isinstance(client, TrackingClient):
        return BlockingTrackingClient(client)
    if isinstance(client, HasBlockingForm):
        return client.build_blocking_client()
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
