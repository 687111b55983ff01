"""The engine in this process: transformers continuous batching behind ``InferenceEngine``."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.continuous_batching import (
    EmbeddedCall,
    EmbeddedManager,
    fail_call,
)
from agentrl_cli.engine.embedded.token_sampling import StopTextFinder
from agentrl_cli.engine.grammar import GrammarError, TokenGrammars, TokenMatcher, find_end_ids
from agentrl_cli.engine.protocol import (
    EngineLoad,
    Generation,
    Probe,
    Replica,
    Sampling,
    check_request,
)
from agentrl_cli.errors import EngineError, EngineTimeoutError, MissingExtraError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)

T = TypeVar("T")

#: A step of the engine that has begun cannot be interrupted; more than this is a hang.
_CLOSE_SECONDS = 10.0
_CLOSED = "the embedded engine was closed"


class EmbeddedEngine:
    """An inference engine on a thread of this process, on CPU or CUDA.

    Owns ``model``: a copy for it alone, in eval mode, on its device. Methods may be called
    from any event loop. Requests of any sampling parameters share a batch; at most
    ``config.max_num_seqs`` are sampled at once, in the order of their arrival.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        model_name: str,
        policy_version: int = 0,
    ) -> None:
        self._config = config
        self._model = model
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._vocabulary_size = model.get_input_embeddings().num_embeddings
        self._end_ids = find_end_ids(model, tokenizer)
        num_logits = model.get_output_embeddings().weight.shape[0]
        self._grammars = TokenGrammars(tokenizer, num_logits, self._end_ids)
        self._calls: dict[str, EmbeddedCall] = {}
        self._call_numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended: EngineError | None = None
        self._manager = EmbeddedManager(
            model,
            config,
            num_threads=config.num_threads or max(1, (os.cpu_count() or 2) // 2),
            policy_version=policy_version,
            on_stopped=self._on_stopped,
        )
        self._manager.start()
        # Also when the interpreter exits.
        self._end_thread = weakref.finalize(self, self._manager.shut_down, _CLOSE_SECONDS)

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        return self._model_name

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and completion together."""
        return self._config.max_model_len

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
    ) -> Generation:
        """Samples one completion; see :class:`InferenceEngine`."""
        self._check_request(prompt_ids, sampling)
        async with aclosing(self._run_call(prompt_ids, sampling, streaming=False)) as pieces:
            return await anext(pieces)

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
    ) -> AsyncIterator[Generation]:
        """Samples one completion token by token; an impossible request is refused at once."""
        self._check_request(prompt_ids, sampling)
        return self._run_call(prompt_ids, sampling, streaming=True)

    async def _run_call(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, streaming: bool
    ) -> AsyncGenerator[Generation]:
        deadline = asyncio.get_running_loop().time() + self._config.generate_timeout_seconds
        tag = sampling.structural_tag
        matcher = None if tag is None else await self._within(deadline, self._start_matcher(tag))
        call = self._open_call(prompt_ids, sampling, matcher, streaming=streaming)
        try:
            while True:
                piece = await self._within(deadline, call.next_piece())
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            with self._lock:
                self._calls.pop(call.request_id, None)
            if not call.finished:
                self._manager.cancel_request(call.request_id)

    async def _within(self, deadline: float, awaited: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(deadline):
                return await awaited
        except TimeoutError:
            raise EngineTimeoutError(
                f"the completion was not finished after "
                f"{self._config.generate_timeout_seconds:g} s (engine.generate_timeout_seconds)"
            ) from None

    async def policy_version(self) -> int:
        """The version of the weights that the engine holds."""
        self._check_alive()
        return self._manager.policy_version

    @property
    def name(self) -> str:
        """What the logs call the engine, which is its own only replica."""
        return "embedded"

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engine itself."""
        return (self,)

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Keeps nothing: a replica in this process cannot come back."""

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights between two steps and drops all caches made with the old ones.

        Calls in flight continue with the new weights, and their caches are computed again.

        Raises:
            EngineError: the weights do not fit (nothing was replaced), or the engine ended.
            EngineTimeoutError: ``publish_timeout_seconds`` passed.
        """

        def publish() -> None:
            copy_weights(self._model, weights)
            self._manager.drop_caches()
            self._manager.policy_version = version

        await self._run_between_steps(publish, "publishing weights")

    async def pause(self) -> None:
        """Freezes sampling; returns when the last step is over."""
        await self._run_between_steps(lambda: setattr(self._manager, "paused", True), "pausing")

    async def resume(self) -> None:
        """Continues frozen and held calls."""
        await self._run_between_steps(lambda: setattr(self._manager, "paused", False), "resuming")

    async def read_load(self) -> EngineLoad:
        """How many calls it has; what its memory does not hold waits."""
        num_calls, num_seats = len(self._calls), self._config.max_num_seqs
        num_running = min(num_calls, num_seats)
        return EngineLoad(
            num_seats=num_seats,
            num_running=num_running,
            num_waiting=num_calls - num_running,
            cache_use=0.0,
        )

    async def release_memory(self) -> None:
        """Keeps it: engine and trainer share the memory of one process anyway."""

    async def reclaim_memory(self) -> None:
        """The memory was never released."""

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        await asyncio.to_thread(self._shut_down)

    def _check_request(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        self._check_alive()
        check_request(prompt_ids, sampling, self.max_model_len)
        if unknown := [i for i in prompt_ids if not 0 <= i < self._vocabulary_size]:
            raise EngineError(
                f"token id {unknown[0]} is outside of the model's vocabulary: "
                f"allowed are 0 to {self._vocabulary_size - 1}"
            )

    def _check_alive(self) -> None:
        if self._ended is not None:
            # A fresh error each time: a traceback grows with every raise of the same one.
            raise type(self._ended)(*self._ended.args) from self._ended.__cause__

    async def _start_matcher(self, tag: str) -> TokenMatcher:
        """What constrains a call to its structural tag."""
        try:
            return await asyncio.to_thread(self._grammars.start, tag)
        except (GrammarError, MissingExtraError) as error:
            raise EngineError(f"structural_tag: {error}") from None

    def _open_call(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        matcher: TokenMatcher | None,
        *,
        streaming: bool,
    ) -> EmbeddedCall:
        room = self.max_model_len - len(prompt_ids)
        stop = tuple(text for text in sampling.stop if text)
        call = EmbeddedCall(
            f"call-{next(self._call_numbers)}",
            list(prompt_ids),
            sampling,
            max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            end_ids=self._end_ids.union(sampling.stop_token_ids),
            stop_finder=StopTextFinder(self._tokenizer, stop) if stop else None,
            matcher=matcher,
            streaming=streaming,
        )
        with self._lock:
            # Under the lock that _on_stopped takes: no call is added to an engine that has ended.
            self._check_alive()
            self._calls[call.request_id] = call
        self._manager.submit(call)
        return call

    async def _run_between_steps(self, run: Callable[[], None], what: str) -> None:
        with self._lock:
            self._check_alive()
            future = self._manager.run_between_steps(run)
        try:
            async with asyncio.timeout(self._config.publish_timeout_seconds):
                await asyncio.wrap_future(future)
        except TimeoutError:
            raise EngineTimeoutError(
                f"{what} was not finished after {self._config.publish_timeout_seconds:g} s "
                "(engine.publish_timeout_seconds)"
            ) from None

    def _on_stopped(self, error: BaseException | None) -> None:
        """Fails all calls. On the engine's thread, just before it ends."""
        with self._lock:
            if self._ended is None and error is not None:
                self._ended = EngineError(
                    f"the embedded engine's thread died: {type(error).__name__}: {error}"
                )
                self._ended.__cause__ = error
                _log.error("%s", self._ended)
            ended = self._ended = self._ended or EngineError(_CLOSED)
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            fail_call(call, ended)

    def _shut_down(self) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = EngineError(_CLOSED)
        self._end_thread()


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces every parameter of ``model``; nothing is changed if anything does not fit.

    Parameters that share a tensor (tied embeddings) may be given under any of their names.

    Raises:
        EngineError: naming what is unknown, missing, or of another shape.
    """
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    given = {id(targets[name]) for name in weights if name in targets}
    problems = [f"{name}: unknown" for name in weights if name not in targets]
    problems += [
        f"{name}: missing" for name, one in model.named_parameters() if id(one) not in given
    ]
    problems += [
        f"{name}: shape {tuple(weights[name].shape)}, the model has {tuple(target.shape)}"
        for name, target in targets.items()
        if name in weights and weights[name].shape != target.shape
    ]
    if problems:
        raise EngineError(
            f"the published weights do not fit the engine's model ({len(problems)} problems):\n  "
            + "\n  ".join(problems[:8])
            + "\nNothing was replaced. Publish every parameter under its Hugging Face name."
        )
    # Tensors may come from another stream of the same device, and may not be computed yet.
    _synchronize(model)
    for name, tensor in weights.items():
        targets[name].copy_(tensor)
    _synchronize(model)


def _synchronize(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
