"""Completions by a vLLM server, with the version of the weights that sampled each token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from agentrl_cli.engine.adapters import Adapter, Adapters
from agentrl_cli.engine.http import ServerHttp
from agentrl_cli.engine.protocol import Generation, Sampling
from agentrl_cli.engine.server import UNKNOWN_VERSION
from agentrl_cli.engine.vllm_replies import (
    GivenUpError,
    Piece,
    expand_spans,
    parse_completion_piece,
    parse_generate_piece,
)
from agentrl_cli.engine.vllm_weights import WeightState
from agentrl_cli.engine.vllm_wire import (
    COMPLETIONS_PATH,
    GENERATE_PATH,
    format_completion,
    format_generate,
    is_greedy,
)
from agentrl_cli.errors import EngineError

#: What a completion is called in messages.
GENERATE_LEG = "generate"

_NO_VERSION = (
    "its weights have no policy version: it was started again and waits for the current ones, or "
    "nobody ever set one"
)


class VllmCalls:
    """Makes completions; ``ask_version`` asks the server which version its weights are."""

    def __init__(
        self,
        http: ServerHttp,
        weights: WeightState,
        adapters: Adapters,
        ask_version: Callable[[], Awaitable[int]],
    ) -> None:
        self._http = http
        self._weights = weights
        self._adapters = adapters
        self._ask_version = ask_version

    async def stream_versioned(
        self, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, stream_interval: int
    ) -> AsyncGenerator[Generation]:
        """By /inference/v1/generate, which says itself which weights sampled which token."""
        with self._adapters.hold() as adapter:
            body = format_generate(
                prompt_ids,
                sampling,
                max_tokens=max_tokens,
                cache_salt=self._weights.make_salt(),
                adapter=adapter.name if adapter else None,
                stream_interval=stream_interval,
            )
            greedy, num_tokens, last = is_greedy(sampling), 0, None
            events = self._http.stream_events(GENERATE_PATH, body, leg=GENERATE_LEG)
            async with aclosing(events):
                async for event in events:
                    piece = parse_generate_piece(
                        event, greedy=greedy, num_top=sampling.num_top_logprobs
                    )
                    num_tokens += len(piece.token_ids)
                    if piece.finish_reason is None:
                        yield _make_generation(piece, ())
                    else:
                        last = piece
            # Only now: a consumer leaves with the last piece, and a connection that was not
            # read to its end cannot be used again.
            if last is None:
                raise GivenUpError("it ended a completion without a finish_reason")
            yield _make_generation(last, self._find_versions(last, num_tokens, adapter))

    def _find_versions(
        self, last: Piece, num_tokens: int, adapter: Adapter | None
    ) -> tuple[int, ...]:
        """The version of each token."""
        if adapter is not None:
            return (adapter.version,) * num_tokens
        versions = expand_spans(last.spans or (), num_tokens)
        if UNKNOWN_VERSION in versions:
            raise GivenUpError(_NO_VERSION)
        return versions

    async def stream_unversioned(
        self, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, stream_interval: int
    ) -> AsyncGenerator[Generation]:
        """By /v1/completions, which knows no versions, in parts of one version each.

        What was received before a change of the weights was sampled before it. Of what is
        received later some may be older and some newer: it is dropped, and the completion
        goes on from the tokens that are certain. (A stop text that such a change cuts in two
        is not found, and a seed begins anew.) Only one with a structural tag begins anew as a
        whole, as nothing goes on in the midst of a grammar: it comes in one piece.
        """
        if sampling.structural_tag is not None:
            yield await self._restart_unversioned(prompt_ids, sampling, max_tokens, stream_interval)
            return
        done: list[int] = []
        versions: list[int] = []
        while True:
            await self._weights.wait_settled()
            epoch = self._weights.epoch
            with self._adapters.hold() as adapter:
                version = adapter.version if adapter else await self._ask_version()
                if version == UNKNOWN_VERSION:
                    raise GivenUpError(_NO_VERSION)
                body = format_completion(
                    [*prompt_ids, *done],
                    sampling,
                    max_tokens=max_tokens - len(done),
                    cache_salt=self._weights.make_salt(),
                    adapter=adapter.name if adapter else None,
                    stream_interval=stream_interval,
                )
                last = None
                part = self._stream_part(body, epoch if adapter is None else None, sampling)
                async with aclosing(part):
                    async for piece in part:
                        done += piece.token_ids
                        versions += [version] * len(piece.token_ids)
                        if piece.finish_reason is None:
                            yield _make_generation(piece, ())
                        else:
                            last = piece
                if last is not None:
                    if adapter is None:
                        await self._check_version(version, epoch)
                    yield _make_generation(last, tuple(versions))
                    return

    async def _restart_unversioned(
        self, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int, stream_interval: int
    ) -> Generation:
        """A whole completion by /v1/completions, sampled by one version from its first token."""
        while True:
            await self._weights.wait_settled()
            epoch = self._weights.epoch
            with self._adapters.hold() as adapter:
                version = adapter.version if adapter else await self._ask_version()
                if version == UNKNOWN_VERSION:
                    raise GivenUpError(_NO_VERSION)
                body = format_completion(
                    prompt_ids,
                    sampling,
                    max_tokens=max_tokens,
                    cache_salt=self._weights.make_salt(),
                    adapter=adapter.name if adapter else None,
                    stream_interval=stream_interval,
                )
                part = self._stream_part(body, epoch if adapter is None else None, sampling)
                async with aclosing(part):
                    pieces = [piece async for piece in part]
                if pieces and pieces[-1].finish_reason is not None:
                    if adapter is None:
                        await self._check_version(version, epoch)
                    return _join(pieces, version)

    async def _stream_part(
        self, body: object, epoch: int | None, sampling: Sampling
    ) -> AsyncGenerator[Piece]:
        """The pieces of one request, up to its end or the end of ``epoch``."""
        is_finished = False
        events = self._http.stream_events(COMPLETIONS_PATH, body, leg=GENERATE_LEG)
        async with aclosing(events):
            async for event in events:
                if epoch is not None and self._weights.epoch != epoch and not is_finished:
                    return
                piece = parse_completion_piece(
                    event, greedy=is_greedy(sampling), num_top=sampling.num_top_logprobs
                )
                is_finished = piece.finish_reason is not None
                yield piece
        if not is_finished:
            raise GivenUpError("it ended a completion without a finish_reason")

    async def _check_version(self, version: int, epoch: int) -> None:
        """Refuses tokens of weights that somebody else may have changed while they were made."""
        if self._weights.epoch != epoch:
            # Ours, and begun after the last token was received.
            return
        now = await self._ask_version()
        if now != version and self._weights.epoch == epoch:
            raise EngineError(
                f"the server had policy version {version} when a completion began and {now} when "
                "it ended, and this run updated nothing: another program writes weights into it"
            )


def _make_generation(piece: Piece, versions: tuple[int, ...]) -> Generation:
    return Generation(
        completion_ids=piece.token_ids,
        rollout_logprobs=piece.logprobs,
        versions=versions,
        finish_reason=piece.finish_reason,
        stop_text=piece.stop_text,
        top_logprobs=piece.top_logprobs,
    )


def _join(pieces: Sequence[Piece], version: int) -> Generation:
    token_ids = tuple(token for piece in pieces for token in piece.token_ids)
    return Generation(
        completion_ids=token_ids,
        rollout_logprobs=tuple(logprob for piece in pieces for logprob in piece.logprobs),
        versions=(version,) * len(token_ids),
        finish_reason=pieces[-1].finish_reason,
        stop_text=pieces[-1].stop_text,
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )
