"""The engine's thread: transformers' continuous batching, with our sampling, gate and outputs.

The classes here replace parts of the library, and are pinned to transformers 5.19, which
pyproject.toml caps. The reasons:

- *Sampling.* The library's per-request processors exist only where the value at creation
  is not neutral, draw from one global generator, and give no place for a seed or a policy
  version. So the last step, logits to tokens, is ours.
- *The gate.* Its own pause blocks the thread that asks, without a deadline. Ours runs
  commands (pause, publish) on the engine's thread between two steps.
- *Outputs.* It copies every token of a request at every output, and keeps for ever what nobody
  fetches. Ours delivers what is new, once per step and event loop.
- *Seeding.* It seeds the process's global generator, which belongs to the trainer.
- *Attention.* See ``paged_attention``.
"""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from random import Random
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.requests import (
    RequestState,
    RequestStatus,
    get_device_and_memory_breakdown,
)
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from agentrl_cli.config.experiment import EngineConfig
from agentrl_cli.engine.embedded.paged_attention import PAGED_ATTENTION, build_layout
from agentrl_cli.engine.embedded.token_sampling import (
    StopTextFinder,
    list_likeliest,
    mask_logits,
    sample_tokens,
)
from agentrl_cli.engine.grammar import TokenMatcher
from agentrl_cli.engine.protocol import FinishReason, Generation, Sampling
from agentrl_cli.errors import EngineError

#: Tokens of one cache page, and the grain at which prompts share their beginnings.
PAGE_SIZE = 16
#: Share of the free memory that the cache may take: the trainer lives in the same process.
_MEMORY_SHARE = {"cpu": 0.15, "cuda": 0.4}
#: Room beyond the longest calls, so that shared beginnings outlive the calls that made them.
_HEADROOM = 1.25


class EmbeddedManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Continuous batching on one daemon thread, with a gate between its steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        num_threads: int,
        policy_version: int,
        on_stopped: Callable[[BaseException | None], None],
    ) -> None:
        super().__init__(
            model=model,
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=build_batching_config(model, config),
        )
        self.output_router = OutputDelivery()
        # The library would seed torch's global generator from this thread, under the trainer.
        self.distributed_helper.set_tp_seed = lambda *_: None
        self.policy_version = policy_version
        self.paused = False
        self._is_cache_poisoned = False
        self._commands: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._num_threads = num_threads
        self._on_stopped = on_stopped

    # Called from other threads

    def start(self) -> None:
        """Allocates the cache and starts the engine's thread.

        A daemon thread, so that it never delays the interpreter's exit.
        """
        # Here, not on the thread: too little memory for the cache is the caller's error.
        self.batch_processor = self._create_batch_processor()
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run, name="agentrl-embedded-engine", daemon=True
        )
        self._generation_thread.start()

    def submit(self, call: EmbeddedCall) -> None:
        """Queues a call, which is sampled as soon as a place in the batch is free."""
        self.input_queue.put(call)
        self._wake_up_loop.set()

    def run_between_steps(self, run: Callable[[], None]) -> Future[None]:
        """Queues ``run`` for the engine's thread; the future tells when it has ended, and how."""
        future = Future[None]()
        self._commands.append((run, future))
        self._wake_up_loop.set()
        return future

    def shut_down(self, timeout_seconds: float) -> None:
        """Ends the thread; calls that are not finished fail."""
        self.background_thread_status.request_stop(
            self.background_thread_status.HARD_STOP, self.distributed_helper.global_rank
        )
        self._wake_up_loop.set()
        thread = self._generation_thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_seconds)
            if not thread.is_alive():
                self.batch_processor = None  # frees the cache

    # On the engine's thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            set_own_threads(self._num_threads)
            self._run_generation_loop()
            error = self.background_thread_status.fatal_error
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.background_thread_status.mark_as_stopped()
            self._on_stopped(error)
            while self._commands:
                _, future = self._commands.popleft()
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineError("the embedded engine has ended"))

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        self._run_commands()
        status = self.background_thread_status
        while self.paused and status.local_status == status.DONT_STOP:
            # An event can be missed between wait and clear: look again after a while.
            self._wake_up_loop.wait(timeout=0.1)
            self._wake_up_loop.clear()
            self._run_commands()
        scheduler = batch_processor.scheduler
        if scheduler.block_new_requests and not scheduler.active_requests:
            # After an eviction the library holds the queue until a request finishes; where
            # all of them were cancelled instead, it would hold it for ever.
            scheduler.block_new_requests = False
        if self._is_cache_poisoned:
            # Whole pages are read, so NaN would spread from their unused ends.
            self.drop_caches()
            batch_processor.cache.cache_tensor.zero_()
            self._is_cache_poisoned = False
        return bool(super()._generation_loop_body(batch_processor, bootstrapping))

    def _run_commands(self) -> None:
        while self._commands:
            run, future = self._commands.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                run()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

    def drop_caches(self) -> None:
        """Forgets every cached key and value, all computed with weights that are gone.

        Requests in flight return to the front of the queue, and the cache of their tokens, the
        sampled ones included, is computed again: what they sample from then on follows the new
        weights exactly, as the versions of their tokens say.
        """
        processor = self.batch_processor
        if processor is None:
            return
        scheduler = processor.scheduler
        in_flight = list(scheduler.active_requests.values())
        for request in in_flight:
            scheduler.finish_request(request.request_id)
        processor.cache.reset()
        waiting = list(scheduler.waiting_requests_order)
        scheduler.waiting_requests_order.clear()
        for request in in_flight:
            scheduler.add_waiting_request(request.create_equivalent_initial_request())
        scheduler.waiting_requests_order.extend(waiting)

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Uses our attention where every layer attends to everything, else the library's."""
        groups = group_layers_by_attn_type(model.config.get_text_config())
        if set(groups) == {"full_attention"} and model._can_set_attn_implementation():
            model.set_attn_implementation(PAGED_ATTENTION)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        processor.model_runner._sample = self._sample
        _queue_by_priority(processor.scheduler)
        if self.model.config._attn_implementation == PAGED_ATTENTION:
            _use_layouts(processor)
        return processor

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Draws the next tokens into ``output_ids``: ids, and below them the logprobs' bits."""
        assert self.batch_processor is not None
        futures = self.batch_processor.inputs_and_outputs.requests_in_batch
        calls: list[EmbeddedCall] = [future.state for future in futures if future.has_new_token]
        if not calls:
            return
        drawn = sample_tokens(
            mask_logits(scores[0, : len(calls)], [call.matcher for call in calls]),
            [call.sampling.temperature for call in calls],
            [call.sampling.top_p for call in calls],
            [call.random.random() for call in calls],
        )
        for row, call in enumerate(calls):
            call.sampled_version = self.policy_version
            num = call.sampling.num_top_logprobs
            if num:
                call.top_logprobs.append(list_likeliest(drawn.distribution[row], num))
        self._is_cache_poisoned |= not bool(drawn.logprobs.isfinite().all())
        output_ids[0, : len(calls)].copy_(drawn.tokens)
        output_ids[1, : len(calls)].copy_(drawn.logprobs.view(torch.int32))


def _queue_by_priority(scheduler: Any) -> None:
    """Has the scheduler begin urgent calls before all others that wait, the last one first."""
    add = scheduler.add_waiting_request

    def add_by_priority(call: EmbeddedCall) -> None:
        add(call)
        if call.sampling.priority < 0:
            scheduler.waiting_requests_order.rotate(1)

    scheduler.add_waiting_request = add_by_priority


def _use_layouts(processor: Any) -> None:
    """Gives our attention its layout at every step, without the lists that it does not read."""
    cache, inputs = processor.cache, processor.inputs_and_outputs
    (allocator,) = cache.cache_allocators.values()
    pages_per_block = allocator.block_physical_stride // allocator.tokens_per_page
    build_indices, build_arguments = cache.extend_read_and_write_indices, inputs.get_model_kwargs

    def build_write_indices(
        request_id: str, past_length: int, query_length: int, _: Any, write_index: Any
    ) -> None:
        build_indices(request_id, past_length, query_length, None, write_index)

    def build_arguments_with_layout(use_padding: bool = False) -> Any:
        arguments = build_arguments(use_padding=use_padding)
        states = [future.state for future in inputs.requests_in_batch]
        arguments["step_layout"] = build_layout(
            [future.query_length for future in inputs.requests_in_batch],
            [state.position_offset for state in states],
            [
                [block * pages_per_block for block in allocator.block_table[state.request_id]]
                for state in states
            ],
            page_size=allocator.tokens_per_page,
            device=inputs.device,
        )
        return arguments

    cache.extend_read_and_write_indices = build_write_indices
    inputs.get_model_kwargs = build_arguments_with_layout


def set_own_threads(num_threads: int) -> None:
    """Sets torch's CPU threads for the calling thread alone.

    torch keeps the number per thread, but threads that never asked take the last one set
    anywhere. A short-lived thread sets that back, so that the trainer keeps its own.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    torch.get_num_threads()
    restorer = threading.Thread(target=torch.set_num_threads, args=(before,))
    restorer.start()
    restorer.join()


def build_batching_config(model: PreTrainedModel, config: EngineConfig) -> ContinuousBatchingConfig:
    """Explicit sizes: room for every call at full length, or for what the memory allows.

    Raises:
        EngineError: not even one call of full length fits.
    """
    text_config = model.config.get_text_config()
    on_cpu = model.device.type == "cpu"
    max_batch_tokens = max(512 if on_cpu else 2048, config.max_num_seqs)
    head_dim, num_kv_heads = find_head_dim(text_config), find_num_key_value_heads(text_config)
    item = model.dtype.itemsize
    # What the library counts per cached token: keys and values of all layers, one layer's
    # working copies, indices, and a mask (even where attention needs none).
    token_bytes = (
        text_config.num_hidden_layers * 2 * num_kv_heads * head_dim * item
        + (2 * text_config.num_attention_heads + num_kv_heads) * head_dim * item
        + 8
        + max_batch_tokens * item
    )
    _, total, reserved, allocated = get_device_and_memory_breakdown()
    share = _MEMORY_SHARE["cpu" if on_cpu else "cuda"]
    affordable = int((total - max(reserved, allocated)) * share) // (token_bytes * PAGE_SIZE)
    pages_per_call = math.ceil(config.max_model_len / PAGE_SIZE) + 1
    wanted = math.ceil(pages_per_call * config.max_num_seqs * _HEADROOM)
    if affordable < pages_per_call:
        raise EngineError(
            f"engine.max_model_len: a call of {config.max_model_len} tokens needs "
            f"{pages_per_call * PAGE_SIZE * token_bytes / 2**30:.1f} GiB of cache and "
            f"{affordable * PAGE_SIZE * token_bytes / 2**30:.1f} GiB may be used. "
            f"Type engine.max_model_len={max(2, (affordable - 1) * PAGE_SIZE)} or less"
        )
    return ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=min(wanted, affordable),
        max_batch_tokens=max_batch_tokens,
        max_requests_per_batch=config.max_num_seqs,
        max_blocks_per_request=0,
        use_cuda_graph=False,
        use_async_batching=False,
        return_logprobs=True,
        auto_switch_to_flash=False,
        max_memory_percent=0.9,
    )


class EmbeddedCall(RequestState):  # type: ignore[misc]
    """One completion while it is being sampled: a request of the library's, with its outputs.

    Three methods of the library's class are replaced: it stops only at end tokens and lengths,
    copies all tokens for every output, and loses attributes of ours when it is evicted.

    The engine's thread appends tokens and the caller's event loop waits. The only thing between
    them is one ``call_soon_threadsafe`` per step and loop, never one per token.
    """

    def __init__(
        self,
        call_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        end_ids: frozenset[int],
        stop_finder: StopTextFinder | None,
        matcher: TokenMatcher | None,
        streaming: bool,
    ) -> None:
        super().__init__(
            request_id=call_id, initial_tokens=prompt_ids, streaming=streaming, max_new_tokens=None
        )
        self.sampling = sampling
        self.loop = asyncio.get_running_loop()
        self.random = Random(sampling.seed)
        self.matcher = matcher
        self.sampled_version = 0
        """Policy version of the weights that sampled the last token."""
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        """One for each sampled token, if any were asked for; that of the next comes before it."""
        self.finished = False
        """Whether the caller has its last piece."""
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._stop_finder = stop_finder
        self._versions: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_text: str | None = None
        self._failure: EngineError | None = None
        self._num_taken = 0
        self._pieces: asyncio.Queue[Generation | EngineError] = asyncio.Queue()

    # On the engine's thread

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Takes the token that the last step sampled; True: the completion is finished."""
        assert logprob is not None
        self.tokens_to_process = [token_id]
        self._accept(token_id, logprob)
        if self._finish_reason is None and self._failure is None:
            return False
        self.status = RequestStatus.FINISHED
        return True

    def _accept(self, token: int, logprob: float) -> None:
        if not -float("inf") < logprob <= 1e-3:
            self._failure = EngineError(
                "the model's output is not a number (policy version "
                f"{self.sampled_version}): its weights hold NaN or infinity. Lower the learning "
                "rate or max_grad_norm, and resume from the last good checkpoint."
            )
            return
        if self.matcher is not None and not self.matcher.accept(token):
            self._failure = EngineError(
                f"after {len(self.generated_tokens)} tokens no token of this vocabulary can "
                "follow as the structural tag requires"
            )
            return
        self.generated_tokens.append(token)
        self.logprobs.append(min(logprob, 0.0))
        self._versions.append(self.sampled_version)
        if token in self._end_ids:
            self._finish_reason = "stop"
        elif self._stop_finder and (stop_text := self._stop_finder.find(token)) is not None:
            self._finish_reason, self._stop_text = "stop", stop_text
        elif len(self.generated_tokens) >= self._max_tokens:
            self._finish_reason = "length"

    def to_generation_output(self) -> Any:
        """The call itself: what is new is taken from it."""
        return self

    def create_equivalent_initial_request(self) -> EmbeddedCall:
        """The call, to compute its cache again, sampled tokens included, and then continue.

        It shares lists and queue with this one, for which the caller waits.
        """
        fresh = copy.copy(self)
        fresh.remaining_prefill_tokens = self.initial_tokens + self.generated_tokens
        fresh.tokens_to_process = []
        fresh.position_offset = 0
        fresh.allocated_blocks = 0
        fresh._status = RequestStatus.PENDING
        return fresh

    def take_piece(self) -> Generation | EngineError:
        """What was sampled since the last piece, or the error."""
        if self._failure is not None:
            return self._failure
        start, self._num_taken = self._num_taken, len(self.generated_tokens)
        return Generation(
            completion_ids=tuple(self.generated_tokens[start:]),
            rollout_logprobs=tuple(self.logprobs[start:]),
            versions=tuple(self._versions[start:]),
            finish_reason=self._finish_reason,
            stop_text=self._stop_text,
            top_logprobs=tuple(self.top_logprobs[start:]),
        )

    # On the caller's event loop

    def put(self, piece: Generation | EngineError) -> None:
        """Delivers a piece to the waiting caller."""
        self._pieces.put_nowait(piece)

    async def next_piece(self) -> Generation:
        """The next piece (the whole completion, unless streaming)."""
        piece = await self._pieces.get()
        if isinstance(piece, EngineError):
            self.finished = True
            raise piece
        self.finished = piece.finish_reason is not None
        return piece


class OutputDelivery(OutputRouter):  # type: ignore[misc]
    """Brings pieces and errors to the event loops that wait for them."""

    def deliver_batch(self, outputs: Iterable[EmbeddedCall]) -> None:
        """Delivers what is new, with one wake-up per event loop."""
        pieces = defaultdict[asyncio.AbstractEventLoop, list[tuple[EmbeddedCall, Any]]](list)
        for call in outputs:
            pieces[call.loop].append((call, call.take_piece()))
        for loop, own in pieces.items():
            _put_on(loop, own)

    def fail_and_deliver(self, state: EmbeddedCall, error: Exception) -> None:
        """Ends a call with an error."""
        state.status = RequestStatus.FAILED
        fail_call(state, error)


def fail_call(call: EmbeddedCall, error: BaseException) -> None:
    """Ends a call with an EngineError whose cause is ``error``. On any thread."""
    if isinstance(error, EngineError):
        failure = error
    else:
        failure = EngineError(f"the embedded engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
    _put_on(call.loop, [(call, failure)])


def _put_on(
    loop: asyncio.AbstractEventLoop, pieces: list[tuple[EmbeddedCall, Generation | EngineError]]
) -> None:
    def put_all() -> None:
        for call, piece in pieces:
            call.put(piece)

    try:
        loop.call_soon_threadsafe(put_all)
    except RuntimeError:
        # The caller's loop is closed: nobody waits any more, and the engine must continue.
        if not loop.is_closed():
            raise
