"""What engines and engine servers offer, and the records that cross their border."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from agentrl_cli.errors import ContextLengthError, EngineError

if TYPE_CHECKING:
    import torch

    from agentrl_cli.engine.engine_server import EngineServer

FinishReason = Literal["stop", "length"]

#: The policy version of a server whose weights were given none since its process started (vLLM's
#: ``default``): reported as such, never raised, so that the router recognizes a restart.
UNKNOWN_VERSION = -1

#: vLLM's own limit, and OpenAI's.
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion."""

    max_tokens: int | None = None
    """Maximum number of tokens to sample; None: as many as ``max_model_len`` leaves."""
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
    priority: int = 0
    """Of the calls that wait for a seat, those with the lowest number are begun first."""


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
class EngineLoad:
    """What an engine does at this moment."""

    num_seats: int
    """Calls that it can sample at a time."""
    num_running: int
    """Calls that it samples."""
    num_waiting: int
    """Calls that wait for a seat, or for memory."""
    cache_use: float
    """Share of the memory for keys and values that is taken, from 0 to 1."""


def join_pieces(pieces: Sequence[Generation]) -> Generation:
    """The completion that was streamed as ``pieces``."""
    last = pieces[-1]
    return Generation(
        completion_ids=tuple(token for piece in pieces for token in piece.completion_ids),
        rollout_logprobs=tuple(logprob for piece in pieces for logprob in piece.rollout_logprobs),
        versions=tuple(version for piece in pieces for version in piece.versions),
        finish_reason=last.finish_reason,
        stop_text=last.stop_text,
        top_logprobs=tuple(top for piece in pieces for top in piece.top_logprobs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt, and what every replica of the engine must say of the next token."""

    prompt_ids: tuple[int, ...]
    logprobs: tuple[tuple[int, float], ...]
    """Likely tokens with the trainer's logprobs in nats."""
    tolerance: float
    """Maximum mean gap over all probes of a version, in nats."""


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
        """The version of the weights that the replica reports."""
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
        """Maximum number of tokens of prompt and completion together."""
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

    @property
    def replicas(self) -> Sequence[Replica]:
        """Everything that holds a copy of the weights and serves at this moment; each is verified
        by itself."""
        ...

    def expect(self, version: int, probes: Sequence[Probe]) -> None:
        """Sets what a replica that recovers later with ``version`` must compute."""
        ...

    async def publish_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights (Hugging Face parameter names) and drops caches made by old ones.

        Calls in flight freeze and continue with the new weights.
        """
        ...

    async def read_load(self) -> EngineLoad | None:
        """What it does at this moment; None: that is not known."""
        ...

    async def release_memory(self) -> None:
        """Gives the trainer the GPU memory it shares with it, until :meth:`reclaim_memory`.

        Calls in flight end first, new ones wait. An engine with memory of its own does nothing.
        """
        ...

    async def reclaim_memory(self) -> None:
        """Takes the memory back; waiting calls continue, with the weights from before."""
        ...

    async def close(self) -> None:
        """Ends the engine; calls in flight get an EngineError. May be called twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEndpoint:
    """Where a server listens. It keeps its endpoint when it is restarted."""

    name: str
    """Such as ``vllm-0``; also of its log file."""
    base_url: str
    """Such as ``http://127.0.0.1:41001``."""
    api_key: str = field(repr=False)
    """Every request carries it; never logged or stored."""
    log_path: str | None = None
    """Its last lines are shown when the server fails; None: unknown here."""


@runtime_checkable
class BroadcastReceiver(Protocol):
    """A server that takes weights from GPU to GPU, over NCCL; the trainer is rank 0.

    Raises as :class:`~agentrl_cli.engine.engine_server.EngineServer`.
    """

    async def join_broadcast(self, unique_id: bytes, world_size: int) -> None:
        """Enters the NCCL group of ``unique_id`` with all its GPUs, as ranks 1 and up.

        Returns when the trainer has entered too.
        """
        ...

    async def receive_broadcast(
        self, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Takes one broadcast for each tensor, in this order, as its new weights.

        ``dtype_names`` are torch's (``bfloat16``). Calls must be paused.
        """
        ...


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """The weights of one version, ready to be given to any number of servers, also later."""

    version: int
    apply: Callable[[EngineServer], Awaitable[None]]
    """Makes a server, which is paused, hold these weights (not yet their version)."""


@runtime_checkable
class WeightTransfer(Protocol):
    """A way for the trainer's weights to reach servers."""

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Makes the weights of ``version`` ready; what it made of older ones may be dropped.

        Raises:
            EngineError: there is no room for them, or no way to the servers.
        """
        ...

    async def close(self) -> None:
        """Drops what it holds: files, process groups."""
        ...


def check_request(prompt_ids: Sequence[int], sampling: Sampling, max_model_len: int) -> None:
    """Refuses what no engine could serve, in words that say what is allowed.

    Raises:
        ContextLengthError: no room is left for an answer.
        EngineError: the prompt is empty, or a sampling parameter is outside of its range.
    """
    if len(prompt_ids) + 1 > max_model_len:
        raise ContextLengthError(len(prompt_ids), max_model_len)
    problem = None
    if not prompt_ids:
        problem = "the prompt is empty: at least one token id is needed"
    elif not 0.0 <= sampling.temperature < float("inf"):
        problem = f"temperature {sampling.temperature} is not allowed: 0 (greedy) or more"
    elif not 0.0 < sampling.top_p <= 1.0:
        problem = f"top_p {sampling.top_p} is not allowed: above 0, at most 1"
    elif sampling.max_tokens is not None and sampling.max_tokens < 1:
        problem = f"max_tokens {sampling.max_tokens} is not allowed: 1 or more"
    elif sampling.num_top_logprobs not in range(MAX_TOP_LOGPROBS + 1):
        num_top = sampling.num_top_logprobs
        problem = f"num_top_logprobs {num_top} is not allowed: 0 to {MAX_TOP_LOGPROBS}"
    elif sampling.structural_tag is not None and sampling.stop_token_ids:
        # Records do not hold them, so the trainer could not make the same masks.
        problem = "stop_token_ids are not allowed beside a structural_tag: use stop texts"
    if problem:
        raise EngineError(problem)
