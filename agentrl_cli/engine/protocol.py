"""What every inference engine offers, and the records that cross its border."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion."""

    max_tokens: int | None = None
    """Most tokens to sample; None: as many as ``max_model_len`` leaves."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the tokens that spell them stay in ``completion_ids``."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, besides the model's own end tokens."""
    seed: int | None = None
    """With a seed, the same prompt and weights give the same tokens whatever else runs."""
    structural_tag: str | None = None
    """What the completion must look like: an xgrammar structural tag, as JSON; None: anything."""
    num_top_logprobs: int = 0
    """How many of the most probable tokens are reported beside each sampled one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sampled completion (or, when streamed, the next piece of one)."""

    completion_ids: tuple[int, ...]
    """Sampled tokens, an end token included."""
    rollout_logprobs: tuple[float, ...]
    """Nats, one per token, of the distribution sampled from: after temperature and top_p.
    Greedy tokens have 0.0."""
    versions: tuple[int, ...]
    """Policy version that sampled each token. Streamed pieces but the last may have none; the
    last then has those of the whole completion."""
    finish_reason: FinishReason | None
    """None only in a streamed piece that is not the last."""
    stop_text: str | None = None
    """The stop text that ended the completion, if one did."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each sampled token the most probable ones as (token id, logprob), best first; empty
    where none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A token sequence, and the logprobs that every replica of the engine must give to it."""

    token_ids: tuple[int, ...]
    """A prompt and a completion sampled by one of the replicas."""
    num_prompt_tokens: int
    logprobs: tuple[float, ...]
    """The trainer's, in nats, of the tokens after the prompt."""
    tolerance: float
    """Nats."""


@runtime_checkable
class Replica(Protocol):
    """One holder of a copy of the weights, by which they can be verified."""

    @property
    def name(self) -> str:
        """What the logs call it, such as ``vllm-0``."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """As :meth:`InferenceEngine.generate`, by this replica and no other."""
        ...

    async def policy_version(self) -> int:
        """The version of the weights that the replica says it holds."""
        ...


@runtime_checkable
class InferenceEngine(Protocol):
    """A model that samples. Every method has a deadline: nothing waits for ever.

    Cancelling the task that awaits ``generate`` (or closing the iterator of
    ``stream``) aborts the request in the engine.
    """

    @property
    def model_name(self) -> str:
        """The name under which the model is served."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> Generation:
        """Samples one completion.

        Raises:
            ContextLengthError: no room is left for an answer.
            EngineError: the engine failed, died, was closed, or passed its deadline.
        """
        ...

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, session_id: str = ""
    ) -> AsyncIterator[Generation]:
        """Samples one completion, yielding pieces as they are made; the last has a finish_reason.

        Raises as :meth:`generate`.
        """
        ...

    async def policy_version(self) -> int:
        """The version of the weights that the engine says it holds.

        Raises:
            WeightMismatchError: its replicas do not agree.
        """
        ...

    @property
    def replicas(self) -> Sequence[Replica]:
        """Who holds a copy of the weights and serves at this moment; each is verified by itself."""
        ...

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Says what a replica that comes back later with ``version`` must be able to show."""
        ...

    @property
    def previous_weights(self) -> Path | None:
        """Safetensors of the version before the last published one, for finding out which
        weights a replica kept; None: not kept."""
        ...

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights (Hugging Face parameter names) and drops caches made by old ones.

        Calls in flight freeze and go on with the new weights.
        """
        ...

    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones until :meth:`resume`."""
        ...

    async def resume(self) -> None:
        """Lets frozen and held calls go on."""
        ...

    async def release_memory(self) -> None:
        """Gives the trainer the GPU memory it shares with it, until :meth:`reclaim_memory`.

        Calls in flight end first, new ones wait. An engine with memory of its own does nothing.
        """
        ...

    async def reclaim_memory(self) -> None:
        """Takes the memory back; calls that waited go on, with the weights from before."""
        ...

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        ...


@runtime_checkable
class ServerFaultCounter(Protocol):
    """An engine over servers that may die, which says how often they did."""

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """Since the engine began, by the name of the metric: ``failovers``, calls that were moved
        to another server or sampled anew; ``server_outages``, how often a server went out;
        ``server_returns``, how often one came in again, restarted or recovered."""
        ...

    @property
    def num_servers_out(self) -> int:
        """Servers that are out at this moment."""
        ...
