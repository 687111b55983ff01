"""Weights from the trainer's GPU to the servers' GPUs, and through a file where that fails."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import BroadcastReceiver, WeightUpdate
from agentrl_cli.engine.weights.weight_folders import FolderTransfer
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
        files: FolderTransfer,
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
        self._written: tuple[NcclUpdate, WeightUpdate] | None = None
        # Broadcasts in several groups of one GPU at the same time may wait for each other.
        self._lock = asyncio.Lock()

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Copies the weights on their GPU; raises as :meth:`FolderTransfer.prepare`."""
        if self.failure is None:
            try:
                snapshot = await asyncio.to_thread(_copy_on_gpu, weights)
                return NcclUpdate(version, snapshot, self)
            except (EngineError, RuntimeError) as error:
                self.give_up(error)
        self._written = None
        return await self._files.prepare(version, weights)

    async def close(self) -> None:
        """Leaves all groups and deletes the files."""
        for name in list(self._groups):
            self._drop_group(name)
        await self._files.close()

    def give_up(self, error: Exception) -> None:
        """Uses files from now on, and reports it once."""
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            text = (
                f"weights cannot go from GPU to GPU (engine.weight_transfer.kind nccl): {error}. "
                "They go through files from now on (disk)"
            )
            _log.warning("%s", text)
            self._on_message(text)

    async def write(self, update: NcclUpdate) -> WeightUpdate:
        """The same weights as files, written once however many servers need them."""
        async with self._lock:
            if self._written is None or self._written[0] is not update:
                written = await self._files.prepare(update.version, update.weights)
                self._written = (update, written)
            return self._written[1]

    async def broadcast(
        self, server: EngineServer, receiver: BroadcastReceiver, weights: Mapping[str, torch.Tensor]
    ) -> None:
        """Sends ``weights`` to one server.

        Raises:
            ServerDownError: the server died.
            EngineError: NCCL or the server failed, twice if their group was an old one.
        """
        name = server.endpoint.name
        async with self._lock:
            was_open = name in self._groups
            try:
                await self._send(name, receiver, weights)
            except (ServerDownError, EngineTimeoutError):
                raise
            except EngineError:
                # A server that was restarted knows nothing of the group it was in before.
                if not was_open:
                    raise
                await self._send(name, receiver, weights)

    async def _send(
        self, name: str, receiver: BroadcastReceiver, weights: Mapping[str, torch.Tensor]
    ) -> None:
        tensors = list(weights.values())
        try:
            if name not in self._groups:
                group = self._groups[name] = NcclGroup()
                await self._join(
                    asyncio.create_task(receiver.join_broadcast(group.unique_id, self._world_size)),
                    lambda: group.enter(self._world_size, tensors[0].device),
                )
            group = self._groups[name]
            receiving = asyncio.create_task(
                receiver.receive_broadcast(
                    list(weights),
                    [str(t.dtype).removeprefix("torch.") for t in tensors],
                    [list(t.shape) for t in tensors],
                )
            )
            await self._join(receiving, lambda: group.send(tensors))
        except BaseException:
            self._drop_group(name)
            raise

    async def _join(self, remote: asyncio.Task[None], local: Callable[[], None]) -> None:
        """Both sides of a collective call, until both are done or one fails."""
        ours = _run_on_daemon_thread(local)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                done, _ = await asyncio.wait({remote, ours}, return_when=asyncio.FIRST_EXCEPTION)
                for one in done:
                    one.result()
        except TimeoutError:
            raise EngineTimeoutError(
                f"NCCL did not finish within {self._timeout_seconds:g} s (half of "
                "engine.publish_timeout_seconds)"
            ) from None
        finally:
            remote.cancel()
            ours.cancel()

    def _drop_group(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is not None:
            group.abort()


@dataclass(frozen=True, slots=True)
class NcclUpdate:
    """A version's weights as tensors on the trainer's GPU."""

    version: int
    weights: Mapping[str, torch.Tensor]
    transfer: NcclTransfer

    async def apply(self, server: EngineServer) -> None:
        """Sends them, or writes a file of them if NCCL fails."""
        if self.transfer.failure is None:
            try:
                if not isinstance(server, BroadcastReceiver):
                    raise EngineError(f"{server.endpoint.name} takes no weights over NCCL")
                await self.transfer.broadcast(server, server, self.weights)
                return
            except ServerDownError:
                raise
            except EngineError as error:
                self.transfer.give_up(error)
        update = await self.transfer.write(self)
        await update.apply(server)


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
_SUM = 0


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _UNIQUE_ID_BYTES),)


class NcclGroup:
    """One NCCL group of the trainer (rank 0) and a server, over the library that torch includes.

    Bound by ctypes: torch's own groups need torch.distributed on both sides, which sends pickles
    through a socket; here the group's id travels over the server's HTTP endpoint. The methods
    block; only :meth:`abort` may be called from another thread meanwhile.
    """

    def __init__(self) -> None:
        """Makes the id of a new group, which nobody has entered yet.

        Raises:
            EngineError: there is no NCCL library.
        """
        self._communicator = ctypes.c_void_p()
        self._stream: torch.cuda.Stream | None = None
        try:
            self._library = ctypes.CDLL("libnccl.so.2")
        except OSError as error:
            raise EngineError(f"the NCCL library cannot be loaded: {error}") from error
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._id = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(self._id)))

    @property
    def unique_id(self) -> bytes:
        """What the other ranks need to enter the group."""
        return bytes(self._id)

    def enter(self, world_size: int, device: torch.device) -> None:
        """Enters on ``device``; waits for all other ranks.

        Raises:
            EngineError: NCCL refused.
        """
        import torch

        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._check(
                self._library.ncclCommInitRank(
                    ctypes.byref(self._communicator), world_size, self._id, 0
                )
            )
            # vLLM's ranks sum one number as soon as they have entered, and wait for ours.
            number = torch.zeros(1, device=device)
            torch.cuda.synchronize()
            self._check(
                self._library.ncclAllReduce(
                    *(_pointer(number), _pointer(number), ctypes.c_size_t(1)),
                    *(_DTYPES[str(number.dtype)], _SUM, self._communicator),
                    ctypes.c_void_p(self._stream.cuda_stream),
                )
            )
            self._stream.synchronize()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcasts each tensor (contiguous, on the group's device); returns when all are sent.

        Raises:
            EngineError: NCCL failed, or the group was aborted.
        """
        import torch

        if self._stream is None:
            raise EngineError("the NCCL group was not entered")
        with torch.cuda.device(self._stream.device):
            torch.cuda.current_stream().synchronize()
            for tensor in tensors:
                self._check(
                    self._library.ncclBroadcast(
                        *(_pointer(tensor), _pointer(tensor), ctypes.c_size_t(tensor.numel())),
                        *(_DTYPES[str(tensor.dtype)], 0, self._communicator),
                        ctypes.c_void_p(self._stream.cuda_stream),
                    )
                )
            self._stream.synchronize()

    def abort(self) -> None:
        """Ends the group at once, also under a broadcast that waits for a dead server."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result != 0:
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise EngineError(f"NCCL: {text} (code {result})")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
