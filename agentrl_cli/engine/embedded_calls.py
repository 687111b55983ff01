"""One call to the embedded engine: what was asked, what was sampled, who waits for it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from random import Random
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from agentrl_cli.engine.grammar import TokenMatcher
from agentrl_cli.engine.protocol import FinishReason, Generation, Sampling
from agentrl_cli.errors import EngineError


class StopTextFinder:
    """Finds the first of some texts in tokens that arrive one by one, across their borders."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._reach = max(len(text) for text in stop) - 1
        self._tail = ""
        self._context: list[int] = []
        self._pending: list[int] = []

    def find(self, token: int) -> str | None:
        """The stop text that ``token`` completes, the earliest in the text; None: none yet."""
        self._pending.append(token)
        # Decoded behind the tokens before it: some tokenizers spell a first token differently.
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        fresh = after[len(before) :]
        text = self._tail + fresh
        places = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if places:
            return min(places, key=lambda place: (place[0], -len(place[1])))[1]
        if not fresh.endswith("\ufffd"):  # else a character is still incomplete
            self._tail = text[-self._reach :] if self._reach else ""
            self._context, self._pending = self._pending, []
        return None

    def _decode(self, ids: list[int]) -> str:
        # Special tokens are text here: "<|im_end|>" can be a stop text too.
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) if ids else ""


class Call:
    """One completion in the making.

    The engine's thread appends tokens; the caller's loop waits. Between the two stands
    one ``call_soon_threadsafe`` per step and loop, never one per token.
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
        self.id = call_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.streaming = streaming
        self.loop = asyncio.get_running_loop()
        self.opened = self.loop.time()
        self.random = Random(sampling.seed)
        self.completion_ids: list[int] = []
        self.matcher = matcher
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        """One for each sampled token, if any were asked for; that of the next comes before it."""
        self.finished = False
        self._max_tokens = max_tokens
        self._end_ids = end_ids
        self._stop_finder = stop_finder
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_text: str | None = None
        self._error: EngineError | None = None
        self._num_taken = 0
        self._pieces: asyncio.Queue[Generation | EngineError] = asyncio.Queue()

    def accept(self, token: int, logprob: float, version: int) -> bool:
        """Takes a sampled token; True: the completion is finished. On the engine's thread."""
        if not -float("inf") < logprob <= 1e-3:
            self._error = EngineError(
                f"the model's output is not a number (policy version {version}): its weights "
                "hold NaN or infinity. Lower the learning rate or max_grad_norm, and go on "
                "from the last good checkpoint."
            )
            return True
        if self.matcher is not None and not self.matcher.accept(token):
            self._error = EngineError(
                f"after {len(self.completion_ids)} tokens no token of this vocabulary goes on as "
                "the structural tag wants"
            )
            return True
        self.completion_ids.append(token)
        self._logprobs.append(min(logprob, 0.0))
        self._versions.append(version)
        if token in self._end_ids:
            self._finish_reason = "stop"
        elif self._stop_finder and (stop_text := self._stop_finder.find(token)) is not None:
            self._finish_reason, self._stop_text = "stop", stop_text
        elif len(self.completion_ids) >= self._max_tokens:
            self._finish_reason = "length"
        return self._finish_reason is not None

    def take_piece(self) -> Generation | EngineError:
        """What was sampled since the last piece, or what went wrong. On the engine's thread."""
        if self._error is not None:
            return self._error
        start, self._num_taken = self._num_taken, len(self.completion_ids)
        return Generation(
            completion_ids=tuple(self.completion_ids[start:]),
            rollout_logprobs=tuple(self._logprobs[start:]),
            versions=tuple(self._versions[start:]),
            finish_reason=self._finish_reason,
            stop_text=self._stop_text,
            top_logprobs=tuple(self.top_logprobs[start:]),
        )

    def put(self, piece: Generation | EngineError) -> None:
        """Hands a piece to whoever waits. On the caller's loop."""
        if isinstance(piece, EngineError) or piece.finish_reason is not None:
            self.finished = True
        self._pieces.put_nowait(piece)

    async def next_piece(self) -> Generation:
        """The next piece (the whole completion, unless streaming)."""
        piece = await self._pieces.get()
        if isinstance(piece, EngineError):
            raise piece
        return piece


class CallRequest(RequestState):  # type: ignore[misc]
    """The manager's view of a :class:`Call`: when it is complete, what it hands out.

    Three methods of the library's class are replaced: it stops at end tokens and lengths
    only, copies all tokens for every output, and loses what it does not know when it is
    evicted. Pinned to transformers 5.19.
    """

    def __init__(self, call: Call) -> None:
        super().__init__(
            request_id=call.id,
            initial_tokens=call.prompt_ids,
            streaming=call.streaming,
            max_new_tokens=None,
        )
        self.call = call
        self.generated_tokens = call.completion_ids
        self.sampled_version = 0

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Takes the token that the last step sampled; True: the completion is finished."""
        assert logprob is not None
        self.tokens_to_process = [token_id]
        if self.call.accept(token_id, logprob, self.sampled_version):
            self.status = RequestStatus.FINISHED
            return True
        return False

    def to_generation_output(self) -> Any:
        """The request itself: the router takes from its call what is new."""
        return self

    def create_equivalent_initial_request(self) -> CallRequest:
        """A request that computes its cache anew, sampled tokens included, and then goes on."""
        fresh = copy.copy(self)
        fresh.remaining_prefill_tokens = self.initial_tokens + self.call.completion_ids
        fresh.tokens_to_process = []
        fresh.position_offset = 0
        fresh.allocated_blocks = 0
        fresh._status = RequestStatus.PENDING
        return fresh
