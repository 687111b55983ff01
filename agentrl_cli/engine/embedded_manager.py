"""The engine's thread: transformers' continuous batching, with our sampling, gate and outputs.

What replaces parts of the library stands in this file, ``CallRequest`` and ``CallRouter``,
pinned to transformers 5.19, which pyproject.toml caps. The reasons:

- *Sampling.* The library's per-request processors exist only where the value at creation
  is not neutral, draw from one global generator, and give no place for a seed or a policy
  version. So the last step, logits to tokens, is ours.
- *The gate.* Its own pause blocks the thread that asks, without a deadline. Ours runs
  commands (pause, publish) on the engine's thread between two steps.
- *Outputs.* It copies every token of a request at every output, and keeps what nobody
  fetches for ever. Ours hands over what is new, once per step and event loop.
- *Seeding.* It seeds the process's global generator, which belongs to the trainer.
- *Attention.* See ``embedded_attention``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import group_layers_by_attn_type
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

from agentrl_cli.config.engine import EngineConfig
from agentrl_cli.engine.embedded_attention import PAGED_ATTENTION, build_layout
from agentrl_cli.engine.embedded_calls import Call, CallRequest
from agentrl_cli.engine.embedded_delivery import CallRouter, Command
from agentrl_cli.engine.embedded_sampling import list_likeliest, mask_logits, sample_tokens
from agentrl_cli.engine.embedded_sizes import build_batching_config
from agentrl_cli.errors import EngineError


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
        self.output_router = CallRouter()
        # The library would seed torch's global generator from this thread, under the trainer.
        self.distributed_helper.set_tp_seed = _seed_nothing
        self.policy_version = policy_version
        self.paused = False
        self._is_cache_poisoned = False
        self._commands: deque[Command] = deque()
        self._num_threads = num_threads
        self._on_stopped = on_stopped

    # -- called from other threads ---------------------------------------------------------

    def start(self) -> None:
        """Makes the cache, and starts the engine's thread.

        A daemon thread, so that it never holds up the interpreter's end.
        """
        # Here, not on the thread: no room for the cache is an error of whoever starts it.
        self.batch_processor = self._create_batch_processor()
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(
            target=self._run, name="agentrl-embedded-engine", daemon=True
        )
        self._generation_thread.start()

    def submit(self, call: Call) -> None:
        """Queues a call; it is sampled as soon as one of the places is free."""
        self.input_queue.put(CallRequest(call))
        self._wake_up_loop.set()

    def run_between_steps(self, command: Command) -> None:
        """Queues a command."""
        self._commands.append(command)
        self._wake_up_loop.set()

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

    @property
    def num_in_flight(self) -> int:
        """Requests that have or wait for a place; a snapshot."""
        processor = self.batch_processor
        if processor is None:
            return self.input_queue.qsize()
        scheduler = processor.scheduler
        return (
            self.input_queue.qsize()
            + len(scheduler.active_requests)
            + len(scheduler.waiting_requests)
        )

    @property
    def cache_free_share(self) -> float:
        """Share of the cache's pages that no request holds; a snapshot."""
        processor = self.batch_processor
        if processor is None:
            return 1.0
        allocators = processor.cache.cache_allocators.values()
        held = {
            (index, page)
            for index, allocator in enumerate(allocators)
            for pages in list(allocator.block_table.values())
            for page in pages
        }
        return 1.0 - len(held) / sum(allocator.num_blocks for allocator in allocators)

    # -- on the engine's thread ------------------------------------------------------------

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
                self._commands.popleft().finish(EngineError("the embedded engine has ended"))

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        self._run_commands()
        while self.paused and not self._is_stopping():
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
            # Pages are read whole: what is not a number would spread from their unused ends.
            self.drop_caches()
            batch_processor.cache.cache_tensor.zero_()
            self._is_cache_poisoned = False
        return bool(super()._generation_loop_body(batch_processor, bootstrapping))

    def _is_stopping(self) -> bool:
        status = self.background_thread_status
        return bool(status.local_status != status.DONT_STOP)

    def _run_commands(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if command.future.cancelled():
                continue
            try:
                command.run()
            except Exception as error:
                command.finish(error)
            else:
                command.finish()

    def drop_caches(self) -> None:
        """Forgets every cached key and value, all made by weights that are gone.

        Requests in flight go back to the front of the queue and have their tokens, the
        sampled ones included, computed anew: what they sample from then on follows the new
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
        """Takes our attention where every layer attends to everything, else the library's."""
        groups = group_layers_by_attn_type(model.config.get_text_config())
        if set(groups) == {"full_attention"} and model._can_set_attn_implementation():
            model.set_attn_implementation(PAGED_ATTENTION)
        else:
            super().switch_to_cb_friendly_attn(model, auto_switch_to_flash)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        processor.model_runner._sample = self._sample
        if self.model.config._attn_implementation == PAGED_ATTENTION:
            _use_layouts(processor)
        return processor

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Draws the next tokens into ``output_ids``: ids, and below them the logprobs' bits."""
        assert self.batch_processor is not None
        futures = self.batch_processor.inputs_and_outputs.requests_in_batch
        requests = [future.state for future in futures if future.has_new_token]
        if not requests:
            return
        for request in requests:
            request.sampled_version = self.policy_version
        calls = [request.call for request in requests]
        drawn = sample_tokens(
            mask_logits(scores[0, : len(calls)], [call.matcher for call in calls]),
            [call.sampling.temperature for call in calls],
            [call.sampling.top_p for call in calls],
            [call.random.random() for call in calls],
        )
        for row, call in enumerate(calls):
            num = call.sampling.num_top_logprobs
            if num:
                call.top_logprobs.append(list_likeliest(drawn.distribution[row], num))
        self._is_cache_poisoned |= not bool(drawn.logprobs.isfinite().all())
        output_ids[0, : len(calls)].copy_(drawn.tokens)
        output_ids[1, : len(calls)].copy_(drawn.logprobs.view(torch.int32))


def _use_layouts(processor: Any) -> None:
    """Gives our attention its layout at every step, and spares the lists it does not read."""
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


def _seed_nothing(*_: Any) -> None:
    """Stands for the library's seeding."""
