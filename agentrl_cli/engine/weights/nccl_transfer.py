"""Weights from the trainer's GPU to the servers' GPUs, and through a file where that fails."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import (
    BroadcastReceiver,
    WeightTransfer,
    WeightUpdate,
)
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

#: Share of the publication's deadline after which NCCL is given up: a file still has time.
_DEADLINE_SHARE = 0.5


class NcclTransfer:
    """Weights over NCCL, one group for each server; after its first failure, through files.

    A version is a snapshot on the trainer's GPU (one more copy of the weights there), since the
    learner's tensors change and a server that comes back must get the version in use.
    """

    def __init__(
        self,
        files: WeightTransfer,
        *,
        num_gpus_per_server: int,
        timeout_seconds: float,
        on_message: Callable[[str], None],
    ) -> None:
        self._files = files
        self._on_message = on_message
        self.failure: str | None = None
        """Why NCCL is not used any more."""
        self._world_size = 1 + num_gpus_per_server
        self._timeout_seconds = _DEADLINE_SHARE * timeout_seconds
        self._groups: dict[str, NcclGroup] = {}
        self._written: WeightUpdate | None = None
        # Broadcasts in several groups of one GPU at the same time may wait for each other.
        self._lock = asyncio.Lock()

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Copies the weights on their GPU; raises as :meth:`WeightTransfer.prepare`."""
        self._written = None
        if self.failure is None:
            try:
                snapshot = await asyncio.to_thread(_copy_on_gpu, weights)
                return WeightUpdate(version, partial(self._apply, version, snapshot))
            except (EngineError, RuntimeError) as error:
                self._give_up(error)
        return await self._files.prepare(version, weights)

    async def close(self) -> None:
        """Leaves all groups and deletes the files."""
        for name in list(self._groups):
            self._drop_group(name)
        await self._files.close()

    def _give_up(self, error: Exception) -> None:
        """Uses files from now on, and reports it once."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            text = (
                f"weights cannot go from GPU to GPU (engine.weight_transfer.kind nccl): {error}. "
                "They go through files from now on (disk)"
            )
            _log.warning("%s", text)
            self._on_message(text)

    async def _apply(
        self, version: int, weights: Mapping[str, torch.Tensor], server: EngineServer
    ) -> None:
        """Sends the weights, or has the server read a file of them if NCCL fails."""
        async with self._lock:
            if self.failure is None:
                try:
                    await self._broadcast(server, weights)
                    return
                except ServerDownError:
                    raise
                except EngineError as error:
                    self._give_up(error)
            written = self._written
            # One file, however many servers need it.
            if written is None or written.version != version:
                written = self._written = await self._files.prepare(version, weights)
        await written.apply(server)

    async def _broadcast(self, server: EngineServer, weights: Mapping[str, torch.Tensor]) -> None:
        name = server.endpoint.name
        if not isinstance(server, BroadcastReceiver):
            raise EngineError(f"{name} takes no weights over NCCL")
        was_open = name in self._groups
        try:
            await self._send(name, server, weights)
        except (ServerDownError, EngineTimeoutError):
            raise
        except EngineError:
            # A server that was restarted knows nothing of the group it was in before.
            if not was_open:
                raise
            await self._send(name, server, weights)

    async def _send(
        self, name: str, receiver: BroadcastReceiver, weights: Mapping[str, torch.Tensor]
    ) -> None:
        tensors = list(weights.values())
        try:
            if name not in self._groups:
                group = self._groups[name] = NcclGroup()
                await self._join(
                    receiver.join_broadcast(group.unique_id, self._world_size),
                    lambda: group.enter(self._world_size, tensors[0].device),
                )
            group = self._groups[name]
            receiving = receiver.receive_broadcast(
                list(weights),
                [str(t.dtype).removeprefix("torch.") for t in tensors],
                [list(t.shape) for t in tensors],
            )
            await self._join(receiving, lambda: group.send(tensors))
        except BaseException:
            self._drop_group(name)
            raise

    async def _join(self, theirs: Awaitable[None], local: Callable[[], None]) -> None:
        """Both sides of a collective call, until both are done or one fails."""
        both = (asyncio.ensure_future(theirs), _run_on_daemon_thread(local))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await asyncio.gather(*both)
        except TimeoutError:
            raise EngineTimeoutError(
                f"NCCL did not finish within {self._timeout_seconds:g} s (half of "
                "engine.publish_timeout_seconds)"
            ) from None
        finally:
            for one in both:
                one.cancel()

    def _drop_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.abort()


def _copy_on_gpu(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    devices = {tensor.device for tensor in weights.values()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        found = ", ".join(sorted(map(str, devices)))
        raise EngineError(f"the trainer's weights must lie on one GPU, found: {found}")
    copies = {
        name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in weights.items()
    }
    torch.cuda.synchronize()
    return copies


def _run_on_daemon_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    """As ``asyncio.to_thread``, but a call that never returns does not delay the exit."""
    future = Future[None]()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="agentrl-nccl", daemon=True).start()
    return asyncio.wrap_future(future)


_UNIQUE_ID_BYTES = 128
#: ncclDataType_t.
_DTYPES = {"torch.float16": 6, "torch.float32": 7, "torch.float64": 8, "torch.bfloat16": 9}


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class NcclGroup:
    """One NCCL group of the trainer (rank 0) and a server, over the library that torch includes.

    Bound by ctypes: torch's own groups need torch.distributed on both sides, which sends pickles
    through a socket; here the group's id travels over the server's HTTP endpoint. The methods
    block and raise EngineError where NCCL fails; only :meth:`abort` may be called from another
    thread meanwhile.
    """

    def __init__(self) -> None:
        """Makes the id of a new group, which nobody has entered yet."""
        self._communicator = ctypes.c_void_p()
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise EngineError(f"the NCCL library cannot be loaded: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = _UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(self._id))

    @property
    def unique_id(self) -> bytes:
        """What the other ranks need to enter the group."""
        return bytes(self._id)

    def enter(self, world_size: int, device: torch.device) -> None:
        """Enters on ``device``; waits for all other ranks."""
        import torch

        with torch.cuda.device(device):
            communicator = ctypes.byref(self._communicator)
            self._call("ncclCommInitRank", communicator, world_size, self._id, 0)
            # vLLM's ranks sum one number as soon as they have entered, and wait for ours.
            self._run_collective("ncclAllReduce", [torch.zeros(1, device=device)])

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcasts each tensor (contiguous, on the group's device); returns when all are sent."""
        self._run_collective("ncclBroadcast", tensors)

    def _run_collective(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        import torch

        with torch.cuda.device(tensors[0].device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            torch.cuda.current_stream().synchronize()
            for tensor in tensors:
                place = ctypes.c_void_p(tensor.data_ptr())
                self._call(
                    name,
                    place,
                    place,
                    ctypes.c_size_t(tensor.numel()),
                    _DTYPES[str(tensor.dtype)],
                    0,  # of a sum the operation, of a broadcast the rank that sends
                    self._communicator,
                    ctypes.c_void_p(stream.cuda_stream),
                )
            stream.synchronize()

    def abort(self) -> None:
        """Ends the group at once, also under a broadcast that waits for a dead server."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._library.ncclCommAbort(communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise EngineError(f"NCCL: {text} (code {result})")
