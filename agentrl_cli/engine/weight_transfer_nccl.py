"""Weights from the trainer's GPU to the servers' GPUs, and through a file where that fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.engine.nccl import NcclGroup
from agentrl_cli.engine.server import BroadcastReceiver, EngineServer, WeightUpdate
from agentrl_cli.engine.weight_transfer_disk import DiskTransfer
from agentrl_cli.errors import EngineError, EngineTimeoutError, ServerDownError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

#: Share of the publication's deadline after which NCCL is given up: a file still has time.
_DEADLINE_SHARE = 0.5


class NcclTransfer:
    """Weights over NCCL, one group for each server; after its first failure, over files.

    A version is a snapshot on the trainer's GPU (one more copy of the weights there): the
    learner's tensors change, and a server that comes back must get the version that serves.
    """

    def __init__(
        self,
        disk: DiskTransfer,
        *,
        num_gpus_per_server: int,
        timeout_seconds: float,
        on_message: Callable[[str], None],
    ) -> None:
        self.disk = disk
        self._on_message = on_message
        self.failure: str | None = None
        """Why NCCL is not used any more."""
        self._world_size = 1 + num_gpus_per_server
        self._timeout_seconds = _DEADLINE_SHARE * timeout_seconds
        self._groups: dict[str, NcclGroup] = {}
        self._written: tuple[NcclUpdate, WeightUpdate] | None = None
        # Broadcasts on several groups of one GPU at the same time may wait for each other.
        self._lock = asyncio.Lock()

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> WeightUpdate:
        """Copies the weights on their GPU; raises as :meth:`DiskTransfer.prepare`."""
        if self.failure is None:
            try:
                snapshot = await asyncio.to_thread(_copy_on_gpu, weights)
                return NcclUpdate(version, snapshot, self)
            except (EngineError, RuntimeError) as error:
                self.give_up(error)
        self._written = None
        return await self.disk.prepare(version, weights)

    @property
    def previous_folder(self) -> Path | None:
        """That of the files, once they are used: what is sent from GPU to GPU is not kept."""
        return self.disk.previous_folder if self.failure is not None else None

    async def close(self) -> None:
        """Leaves all groups and deletes the files."""
        for name in list(self._groups):
            self._drop_group(name)
        await self.disk.close()

    def give_up(self, error: Exception) -> None:
        """Says once that files are used from now on."""
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
                written = await self.disk.prepare(update.version, update.weights)
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
                # A server that was started again knows nothing of the group of its former life.
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
    """As ``asyncio.to_thread``, but a call that never returns does not hold up the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def finish(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def run() -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(finish, error)
        except RuntimeError:
            # An aborted call may end after the loop: nobody waits for it any more.
            if not loop.is_closed():
                raise

    threading.Thread(target=run, name="agentrl-nccl", daemon=True).start()
    return future
