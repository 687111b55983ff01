"""The processes that train one model together ("ranks"), as one of them sees them.

How several ranks make one update, which is that of one process:

- Every rank runs the same loop with the same learner, and holds a shard of the weights and of the
  optimizer's state (FSDP2). Rank 0 alone has the rollouts, the engine, metrics and checkpoints; it
  broadcasts each step's trajectories, and what else it has decided.
- Every rank builds all samples of the step, and so the same advantages and denominators; of each
  minibatch it passes its own share through the model. The parts of the loss add up, so gradients
  are summed over ranks, never averaged.
- All ranks take part in a pass through a sharded model, so all make equally many: a rank with
  fewer micro-batches makes empty passes, whose gradient is 0; and a loss that is not finite on one
  rank stops all of them at the end of the minibatch, with one message.
- What needs the whole model (publication, checkpoint) works on a copy that rank 0 gathers
  parameter by parameter. So a checkpoint is the files that one process writes, and any number of
  ranks reads it.
- Every exchange has a deadline, but for waiting until rank 0 has the next batch: its rollouts have
  deadlines of their own. A rank that dies breaks its connections to the others; the command ends
  them all and starts them again from the last checkpoint.

A process that trains alone is a world of one: the same code, with nobody to exchange with. Small
things (decisions, counts, logprobs) go through gloo on the CPU, shards through NCCL where the ranks
have GPUs. Ranks of one machine stay on its loopback interface; nothing is pickled.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import psutil
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from agentrl_cli.train.rendezvous import RankLostError, Rendezvous

#: The longest exchange is that with a rank 0 that writes a checkpoint to a slow disk, or with
#: another rank that loads its model.
_EXCHANGE_SECONDS = 3600.0
_POLL_SECONDS = 0.1
#: How long the others wait until rank 0 has something to broadcast. Far beyond any batch: gloo
#: needs a number.
_BROADCAST_SECONDS = 30 * 24 * 3600.0

T = TypeVar("T")

_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"
_DISCARD_PORT = 9


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the ranks tell each other; every method is called by all of them, in one order."""

    index: int = 0
    """Of this process; 0 has the rollouts."""
    count: int = 1
    mesh: DeviceMesh | None = None
    """Over which weights are sharded; None: this process trains alone."""
    _control: dist.ProcessGroup | None = None
    _announcements: dist.ProcessGroup | None = None

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, in float64, the same bits on each."""
        own = torch.tensor(values, dtype=torch.float64)
        return torch.stack(self.gather_tensors(own)).sum(0).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which JSON can hold, by rank."""
        if self.count == 1:
            return [value]
        parts = self.gather_tensors(_to_tensor(json.dumps(value).encode()))
        return [json.loads(part.numpy().tobytes()) for part in parts]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of one dimension, on the CPU, by rank; lengths may differ."""
        own = tensor.detach().cpu()
        if self.count == 1:
            return [own]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(lengths, torch.tensor([len(own)]), group=self._control)
        longest = max(int(length) for length in lengths)
        padded = own.new_zeros(longest)
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in range(self.count)]
        if longest:
            dist.all_gather(parts, padded, group=self._control)
        return [part[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, which JSON can hold; that of others does not matter."""
        if self.count == 1:
            return value
        return json.loads(self.broadcast_bytes(json.dumps(value).encode()))

    def broadcast_bytes(self, content: bytes) -> bytes:
        """The bytes of rank 0, for which the others wait as long as it takes."""
        if self.count == 1:
            return content
        data = _to_tensor(content) if self.index == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self._announcements)
        if self.index > 0:
            data = torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(data, 0, group=self._control)
        return data.numpy().tobytes()

    def barrier(self) -> None:
        """Returns when all have come here."""
        self.gather_tensors(torch.zeros(0))

    def in_turn(self, action: Callable[[], T]) -> T:
        """What ``action`` returns, called on one rank after the other: where each needs a whole
        model for a moment, so that one stands in memory."""
        for turn in range(self.count):
            if turn == self.index:
                result = action()
            self.barrier()
        return result


#: A process that trains alone.
SINGLE = Ranks()


@contextmanager
def open_ranks(
    rendezvous: Rendezvous | None,
    *,
    on_gpu: bool = False,
    exchange_seconds: float = _EXCHANGE_SECONDS,
) -> Iterator[Ranks]:
    """Meets the other ranks (None: there are none), and leaves them when all have ended the block
    without an error.

    After an error others may be in the middle of an exchange, and to leave would be to wait.

    Args:
        rendezvous: which of them this process is.
        on_gpu: each has a GPU of its own; shards then go through NCCL.
        exchange_seconds: deadline of each exchange.

    Raises:
        RankLostError: another rank died, or did not come to an exchange in time.
    """
    if rendezvous is None or rendezvous.count == 1:
        yield SINGLE
        return
    _choose_interface(rendezvous.address)
    if on_gpu:
        torch.cuda.set_device(0)
    deadline = timedelta(seconds=exchange_seconds)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=None if rendezvous.has_store else rendezvous.address,
            store=_meet_in_store(rendezvous, deadline) if rendezvous.has_store else None,
            rank=rendezvous.index,
            world_size=rendezvous.count,
            timeout=deadline,
        )
        ranks = Ranks(
            rendezvous.index,
            rendezvous.count,
            DeviceMesh("cuda" if on_gpu else "cpu", list(range(rendezvous.count))),
            dist.new_group(backend="gloo", timeout=deadline),
            dist.new_group(backend="gloo", timeout=timedelta(seconds=_BROADCAST_SECONDS)),
        )
        yield ranks
        # Rank 0 has servers and agents to end.
        ranks.broadcast(None)
        dist.destroy_process_group()
    except RuntimeError as error:
        # gloo has no type of its own.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise RankLostError(
            f"another of the {rendezvous.count} processes that train together has ended, or has "
            f"not answered for {exchange_seconds:g} s"
        ) from error


def _meet_in_store(rendezvous: Rendezvous, deadline: timedelta) -> Any:
    """A part of the store that those ranks have to themselves that are alive together.

    The store remembers ranks that were killed. So each start of rank 0 gets a number, and the
    others answer to the latest until rank 0 has seen the answer of this process, not of an earlier
    one.
    """
    url = urlsplit(rendezvous.address)
    server = TCPStore(url.hostname or "", url.port or 0, is_master=False, timeout=deadline)
    store = PrefixStore("agentrl", server)
    if rendezvous.index == 0:
        start = store.add("starts", 1)
        answers = [store.get(f"{start}/{rank}").decode() for rank in range(1, rendezvous.count)]
        store.set(f"{start}/seen", json.dumps(answers))
        return PrefixStore(f"ranks-{start}", store)
    own, give_up_at = secrets.token_hex(8), time.monotonic() + deadline.total_seconds()
    while time.monotonic() < give_up_at:
        start = store.add("starts", 0)
        store.set(f"{start}/{rendezvous.index}", own)
        if store.check([f"{start}/seen"]) and own in json.loads(store.get(f"{start}/seen")):
            return PrefixStore(f"ranks-{start}", store)
        time.sleep(_POLL_SECONDS)
    raise dist.DistStoreError(f"rank 0 has not come in {deadline.total_seconds():g} s")


def _choose_interface(address: str) -> None:
    """Makes gloo and NCCL meet the others through the network interface that leads to them."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    url = urlsplit(address)
    if url.scheme == "file":
        # On one machine a file is the better place: torch's own store listens on every interface.
        os.environ |= dict.fromkeys(names, _LOOPBACK)
        return
    interface = _LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: the system chooses the way.
        probe.connect((url.hostname or "", _DISCARD_PORT))
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if own in {found.address for found in addresses}:
            interface = name
    for name in names:
        # A cluster may have a faster network than the one that its names lead to.
        os.environ.setdefault(name, interface)


def _to_tensor(content: bytes) -> Tensor:
    if not content:  # Which torch.frombuffer refuses.
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
