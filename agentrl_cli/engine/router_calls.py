"""One completion that survives the servers it is sampled on."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.engine.router_pool import (
    Attempt,
    RoutedServer,
    ServerPool,
    describe_foreign,
    is_down,
    shorten,
)
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError

#: Tokens to a piece where nobody reads along. A piece costs about 0.1 ms here; a server that
#: dies costs its calls at most this many tokens each, a second of sampling.
_STREAM_INTERVAL = 64
#: For a question in mid-call; asked again with the next piece.
_ASK_SECONDS = 5.0


class RoutedCall:
    """One call: sampled by a server, and by another from where the first one died.

    What is kept of a broken attempt is appended to the prompt, and the rest is sampled from
    there. With stop texts a broken call starts over instead, as such a text may span the cut,
    and with a structural tag, whose grammar begins with the completion; neither is streamed (all
    comes in one piece), as nothing handed out can be taken back.

    Args:
        pool: the servers.
        prompt_ids: checked.
        sampling: checked.
        session_id: calls of one session go to one server, for its prefix cache.
        max_model_len: most tokens of prompt and completion together.
        timeout_seconds: for the whole call. Time frozen by a pause, or without any server,
            counts: it is what the caller is promised to wait at most.
        reading_along: whether pieces are handed out as soon as nothing can take them back.
        only_on: the one server that may sample it; the call fails with it.
    """

    def __init__(
        self,
        pool: ServerPool,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str,
        max_model_len: int,
        timeout_seconds: float,
        reading_along: bool = False,
        only_on: RoutedServer | None = None,
    ) -> None:
        self._pool = pool
        self._prompt_ids = list(prompt_ids)
        self._sampling = sampling
        self._session_id = session_id
        room = max_model_len - len(prompt_ids)
        self._max_tokens = min(room, sampling.max_tokens or room)
        self._timeout_seconds = timeout_seconds
        self._deadline = asyncio.get_running_loop().time() + timeout_seconds
        self._starts_over = bool(sampling.stop) or sampling.structural_tag is not None
        self._reading_along = reading_along and not self._starts_over
        self._only_on = only_on
        self._completion_ids: list[int] = []
        self._rollout_logprobs: list[float] = []
        self._versions: list[int] = []
        self._top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self._num_handed_out = 0
        self._attempt: Attempt | None = None
        self._stream: AsyncGenerator[Generation, None] | None = None

    async def next_piece(self) -> Generation:
        """What comes next: the whole completion, or when read along, the next safe piece.

        Raises:
            EngineTimeoutError: the call's deadline passed.
            ServerDownError: the only server that may sample the call is out.
            EngineError: a server that is well refused the call, or the engine was closed.
        """
        while True:
            attempt = self._attempt or await self._begin_attempt()
            try:
                async with attempt.server.until_out(attempt.epoch, self._deadline):
                    piece = await self._receive(attempt)
            except TimeoutError:
                raise EngineTimeoutError(self._describe_timeout(attempt)) from None
            except EngineError as error:
                if not await is_down(attempt.server, error):
                    raise
                await self._leave(attempt, shorten(str(error)))
                continue
            if piece is not None:
                return piece

    async def aclose(self) -> None:
        """Aborts the call in the server, if it is still sampled."""
        attempt, stream, self._attempt, self._stream = self._attempt, self._stream, None, None
        if attempt is not None:
            attempt.server.attempts.discard(attempt)
        if stream is not None:
            await stream.aclose()

    async def _begin_attempt(self) -> Attempt:
        server = await self._find_server()
        num_kept = len(self._completion_ids)
        sampling = replace(
            self._sampling,
            max_tokens=self._max_tokens - num_kept,
            seed=derive_seed(self._sampling.seed, num_kept),
        )
        attempt = self._attempt = Attempt(server, self._pool.tick())
        server.attempts.add(attempt)
        server.num_calls += 1
        self._stream = server.client.stream(  # type: ignore[assignment]
            [*self._prompt_ids, *self._completion_ids],
            sampling,
            session_id=self._session_id,
            stream_interval=1 if self._reading_along else _STREAM_INTERVAL,
        )
        return attempt

    async def _find_server(self) -> RoutedServer:
        while True:
            self._pool.check_alive()
            if self._only_on is not None:
                server = self._only_on
                if not server.is_in or server.version is None:
                    raise ServerDownError(f"{server.name} is out: {server.out_reason}")
                return server
            chosen = self._pool.choose(self._session_id)
            if chosen is not None:
                return chosen
            await self._pool.wait_for_server(
                self._deadline,
                f"the completion was not finished after {self._timeout_seconds:g} s "
                "(engine.generate_timeout_seconds)",
            )

    async def _receive(self, attempt: Attempt) -> Generation | None:
        """Waits for the server's next piece; what can be handed out now, if anything."""
        assert self._stream is not None
        try:
            piece = await anext(self._stream)
        except StopAsyncIteration:
            raise ServerDownError(f"{attempt.server.name} ended its answer too early") from None
        attempt.add(piece, self._pool.tick())
        if piece.finish_reason is not None:
            return self._finish(attempt, piece)
        if not self._reading_along:
            return None
        if not attempt.is_confirmed and not attempt.is_sealed:
            await self._ask_version(attempt)
        return self._hand_out(attempt)

    async def _ask_version(self, attempt: Attempt) -> None:
        """Lets the server show that it holds the version of the attempt, in mid-call."""
        asked_at = self._pool.tick()
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                version = await attempt.server.client.policy_version()
        except (TimeoutError, EngineTimeoutError):
            # It is slow, or hangs, which its watch will find: the reader waits meanwhile.
            return
        attempt.server.add_evidence(version, asked_at)
        if version not in attempt.allowed_versions:
            raise ServerDownError(describe_foreign(attempt.server, {version}))

    def _hand_out(self, attempt: Attempt) -> Generation | None:
        """The tokens that are beyond doubt and were not handed out yet."""
        num_kept = len(self._completion_ids)
        start, end = self._num_handed_out - num_kept, attempt.num_certain
        if end <= start:
            return None
        self._num_handed_out = num_kept + end
        return Generation(
            completion_ids=tuple(attempt.completion_ids[start:end]),
            rollout_logprobs=tuple(attempt.rollout_logprobs[start:end]),
            versions=(),
            finish_reason=None,
            top_logprobs=tuple(attempt.top_logprobs[start:end]),
        )

    def _finish(self, attempt: Attempt, last: Generation) -> Generation:
        """The last piece, with the versions of all tokens."""
        server, num_tokens = attempt.server, len(attempt.completion_ids)
        if not num_tokens == len(attempt.rollout_logprobs) == len(last.versions):
            raise EngineError(
                f"{server.name} answered with {num_tokens} tokens, "
                f"{len(attempt.rollout_logprobs)} logprobs and {len(last.versions)} versions"
            )
        foreign = set(last.versions) - attempt.allowed_versions
        if foreign:
            self._refuse_foreign(attempt, last.versions, foreign)
        for version in set(last.versions):
            server.add_evidence(version, attempt.began_at)
        self._keep(attempt, last.versions)
        start = self._num_handed_out
        return Generation(
            completion_ids=tuple(self._completion_ids[start:]),
            rollout_logprobs=tuple(self._rollout_logprobs[start:]),
            versions=tuple(self._versions),
            finish_reason=last.finish_reason,
            stop_text=last.stop_text,
            top_logprobs=tuple(self._top_logprobs[start:]),
        )

    def _refuse_foreign(self, attempt: Attempt, versions: Sequence[int], foreign: set[int]) -> None:
        """Lets go of all that was sampled with weights that nobody published."""
        problem = describe_foreign(attempt.server, foreign)
        num_handed_out = max(0, self._num_handed_out - len(self._completion_ids))
        if foreign.intersection(versions[:num_handed_out]):
            raise EngineError(f"{problem}; a part of the completion was handed out already")
        attempt.distrust(num_handed_out)
        raise ServerDownError(problem)

    async def _leave(self, attempt: Attempt, reason: str) -> None:
        """Gives up an attempt whose server is out, and keeps what is certain of it."""
        self._pool.take_out(attempt.server, attempt.epoch, reason)
        self._pool.check_alive()
        if self._only_on is not None:
            raise ServerDownError(f"{attempt.server.name} is out: {reason}")
        self._pool.num_failovers += 1
        if not self._starts_over:
            self._keep(attempt, [attempt.version] * attempt.num_certain)
        await self.aclose()

    def _keep(self, attempt: Attempt, versions: Sequence[int]) -> None:
        """Makes the attempt's first tokens, as many as ``versions``, part of the completion."""
        self._completion_ids += attempt.completion_ids[: len(versions)]
        self._rollout_logprobs += attempt.rollout_logprobs[: len(versions)]
        self._top_logprobs += attempt.top_logprobs[: len(versions)]
        self._versions += versions

    def _describe_timeout(self, attempt: Attempt) -> str:
        num_tokens = len(self._completion_ids) + len(attempt.completion_ids)
        return (
            f"the completion was not finished after {self._timeout_seconds:g} s "
            f"(engine.generate_timeout_seconds): {num_tokens} of at most {self._max_tokens} "
            f"tokens were sampled, the last by {attempt.server.name}"
        )


def derive_seed(seed: int | None, num_kept: int) -> int | None:
    """The seed of an attempt that goes on behind ``num_kept`` tokens.

    With the call's own seed it would draw what the first attempt drew for other places.
    """
    if seed is None or num_kept == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{num_kept}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
