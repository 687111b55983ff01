"""From the engine's thread to the event loops that wait: pieces, errors, done commands."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import RequestStatus

from agentrl_cli.engine.embedded_calls import Call, CallRequest
from agentrl_cli.engine.protocol import Generation
from agentrl_cli.errors import EngineError


class Command:
    """Something to run on the engine's thread between two steps, and the future of its result."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()

    def finish(self, error: Exception | None = None) -> None:
        """Wakes whoever waits. On any thread."""

        def settle() -> None:
            if self.future.done():
                return
            if error is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(error)

        _call_on(self.loop, settle)


def _call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        # The caller's loop is closed: nobody waits any more, and the engine must live on.
        if not loop.is_closed():
            raise


class CallRouter(OutputRouter):  # type: ignore[misc]
    """Brings pieces and errors to the loops that wait for them."""

    def deliver(self, output: CallRequest) -> None:
        """Hands over what is new of one request."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: Iterable[CallRequest]) -> None:
        """Hands over what is new, with one wake-up per event loop."""
        pieces = defaultdict[asyncio.AbstractEventLoop, list[tuple[Call, Any]]](list)
        for request in outputs:
            pieces[request.call.loop].append((request.call, request.call.take_piece()))
        for loop, own in pieces.items():
            _call_on(loop, lambda own=own: _put_all(own))  # type: ignore[misc]

    def fail_and_deliver(self, state: CallRequest, error: Exception) -> None:
        """Ends a request with an error."""
        state.status = RequestStatus.FAILED
        fail_call(state.call, error)


def fail_call(call: Call, error: BaseException) -> None:
    """Ends a call with an EngineError whose cause is ``error``. On any thread."""
    if isinstance(error, EngineError):
        failure = error
    else:
        failure = EngineError(f"the embedded engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    _call_on(call.loop, lambda: call.put(failure))


def _put_all(pieces: list[tuple[Call, Generation | EngineError]]) -> None:
    for call, piece in pieces:
        call.put(piece)
