"""One engine server as the router sees it, whatever it is made by."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from agentrl_cli.engine.protocol import Generation, Replica, Sampling

if TYPE_CHECKING:
    import torch

#: The policy version of a server whose weights nobody has versioned since its process started
#: (vLLM's ``default``): reported as such, never raised, so that the router sees a restart.
UNKNOWN_VERSION = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEndpoint:
    """Where a server listens. It keeps its endpoint when it is started again."""

    name: str
    """Such as ``vllm-0``; also of its log file."""
    base_url: str
    """Such as ``http://127.0.0.1:41001``."""
    api_key: str = field(repr=False)
    """Every request carries it; never logged or stored."""
    log_path: str | None = None
    """Its last lines are shown when the server fails; None: unknown here."""


@runtime_checkable
class EngineServer(Replica, Protocol):
    """A client of one server process, over that server's own HTTP endpoints.

    Raises, in every method:
        ServerDownError: the connection was refused, reset or closed: the process died.
        EngineTimeoutError: a deadline passed; the message names the leg and the server and
            shows the last lines of its log.
        EngineError: the server answered with an error of its own (shown).
    """

    @property
    def endpoint(self) -> ServerEndpoint:
        """Where it listens."""
        ...

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        stream_interval: int = 1,
    ) -> AsyncIterator[Generation]:
        """Samples one completion; a piece for every ``stream_interval`` tokens or more.

        Only the last piece, which has a finish_reason, has versions: those of all tokens.
        Closing the iterator aborts the request in the server. There is no deadline here: a
        call may be frozen by a pause, and the router knows when it began.
        """
        ...

    async def score(self, token_ids: Sequence[int], start: int) -> list[float]:
        """Logprobs (nats, temperature 1) of the tokens from position ``start`` on."""
        ...

    async def check_health(self) -> int:
        """What ``policy_version`` gives, if the server is able to serve; within a few seconds."""
        ...

    async def pause(self) -> None:
        """Freezes calls in flight and holds new ones."""
        ...

    async def resume(self) -> None:
        """Lets them go on."""
        ...

    async def load_weights(self, folder: Path) -> None:
        """Reads all weights from the safetensors files of ``folder``; calls must be paused."""
        ...

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Serves the peft adapter in ``folder`` from now on, and drops the one before."""
        ...

    async def set_policy_version(self, version: int) -> None:
        """Says which version the weights are; tokens sampled from now on carry it."""
        ...

    async def sleep(self) -> None:
        """Gives up its GPU memory once the calls in flight have ended; new ones wait."""
        ...

    async def wake(self) -> None:
        """Takes the memory back and goes on, with the weights from before."""
        ...

    async def close(self) -> None:
        """Closes the connections; the process is not touched."""
        ...


@runtime_checkable
class BroadcastReceiver(Protocol):
    """A server that takes weights from GPU to GPU, over NCCL; the trainer is rank 0.

    Raises as :class:`EngineServer`.
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


@runtime_checkable
class WeightUpdate(Protocol):
    """The weights of one version, ready to be given to any number of servers, also later."""

    @property
    def version(self) -> int:
        """The policy version."""
        ...

    async def apply(self, server: EngineServer) -> None:
        """Makes ``server``, which is paused, hold these weights (not yet their version)."""
        ...


@runtime_checkable
class WeightTransfer(Protocol):
    """A way for the trainer's weights to reach servers."""

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Makes the weights of ``version`` ready; what it made of older ones may be dropped.

        Raises:
            EngineError: there is no room for them, or no way to the servers.
        """
        ...

    @property
    def previous_folder(self) -> Path | None:
        """Safetensors of the version before the last prepared one (at first: the folder the
        servers loaded), for finding out which weights a server kept; None: not kept."""
        ...

    async def close(self) -> None:
        """Drops what it holds: files, process groups."""
        ...
