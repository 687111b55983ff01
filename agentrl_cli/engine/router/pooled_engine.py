"""Calls over a pool of servers: each goes to a healthy one, and to another where that one fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.protocol import EngineLoad, Generation, Replica, Sampling, check_request
from agentrl_cli.engine.router.server_pool import ServerPool, shorten
from agentrl_cli.errors import EngineError, ServerBusyError, ServerDownError

#: A call may find each server dead before the router knows that it is; beyond that it is sampled
#: again this often. One that breaks its servers must not reach all of them again and again.
_MAX_RESAMPLINGS = 3
#: Before a call goes to busy servers again, at most; then twice as long, up to a limit.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 1.0, 30.0


class PooledEngine:
    """The part of an inference engine that samples, over the servers of a pool."""

    def __init__(self, pool: ServerPool, config: EngineConfig, model_name: str) -> None:
        self._pool = pool
        self._config = config
        self._model_name = model_name

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model_name

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self._config.max_model_len

    @property
    def replicas(self) -> Sequence[Replica]:
        """The healthy servers, each by itself: a call fails with its server."""
        return self._pool.serving

    async def read_load(self) -> EngineLoad | None:
        """That of the healthy servers that say it, added up; ``cache_use`` is the highest."""
        servers = [server.client for server in self._pool.healthy]
        found = await asyncio.gather(*(s.read_load() for s in servers), return_exceptions=True)
        loads = [load for load in found if isinstance(load, EngineLoad)]
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineError):
                raise error
        if not loads:
            return None
        return EngineLoad(
            num_seats=sum(load.num_seats for load in loads),
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            cache_use=max(load.cache_use for load in loads),
        )

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Samples one completion; see :class:`InferenceEngine`."""
        check_request(prompt_ids, sampling, self.max_model_len)
        async with aclosing(self._sample(prompt_ids, sampling, session_id)) as completions:
            return await anext(completions)

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """Samples one completion and yields its pieces as they come.

        What was yielded cannot be taken back: a server that fails after that fails the call.
        Before, the call is sampled again elsewhere.
        """
        check_request(prompt_ids, sampling, self.max_model_len)
        return self._sample(prompt_ids, sampling, session_id, is_streamed=True)

    async def _sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session_id: str,
        *,
        is_streamed: bool = False,
    ) -> AsyncGenerator[Generation]:
        """The pieces of the completion, or the whole of it; raises as :meth:`generate`."""
        deadline = self._pool.find_call_deadline()
        num_left = _MAX_RESAMPLINGS + len(self._pool.servers)
        pauses = _draw_pauses()
        while True:
            server = await self._pool.choose(session_id, deadline)
            has_begun = False
            try:
                if not is_streamed:
                    yield await server.generate(prompt_ids, sampling, deadline=deadline)
                    return
                pieces = server.sample(prompt_ids, sampling, deadline, stream_interval=1)
                async with aclosing(pieces):
                    async for piece in pieces:
                        has_begun = True
                        yield piece
                return
            except (ServerDownError, ServerBusyError) as error:
                pause = next(pauses) if isinstance(error, ServerBusyError) else 0.0
                # How often a server has too much to do is no matter, only for how long.
                num_left -= not (isinstance(error, ServerBusyError) and error.is_rate_limit)
                problem = ""
                if has_begun:
                    problem = (
                        "A part of the streamed reply was handed out already, so that it cannot "
                        "be sampled again"
                    )
                elif not num_left:
                    problem = (
                        f"The call was sampled again {_MAX_RESAMPLINGS} times and more, and failed "
                        "each time"
                    )
                elif pause and self._pool.now() + pause >= deadline:
                    problem = (
                        "The call may take no longer than engine.generate_timeout_seconds="
                        f"{self._config.generate_timeout_seconds:g}"
                    )
                if problem:
                    raise type(error)(f"{shorten(str(error))}. {problem}") from error
                self._pool.counts["resampled_calls"] += 1
                await asyncio.sleep(pause)


def _draw_pauses() -> Iterator[float]:
    """Seconds between attempts at one call: those that failed together do not return together."""
    longest = _FIRST_PAUSE_SECONDS
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(2 * longest, _MAX_PAUSE_SECONDS)
