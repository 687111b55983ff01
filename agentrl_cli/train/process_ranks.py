"""Ranks that are processes of one machine, over torch.distributed.

Small things (commands, counts, logprobs) go through gloo on the CPU, shards through NCCL where
the ranks have GPUs. Both stay on the loopback interface, and nothing is pickled.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from agentrl_cli.train.rank_place import RankLostError, RankPlace

#: How long a rank waits for the others in any exchange. The longest that it does is while the first
#: one writes a checkpoint to a slow disk, or another loads its model.
EXCHANGE_SECONDS = 3600.0

_LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class ProcessRanks:
    """One of several processes; made by :func:`open_ranks`."""

    def __init__(self, place: RankPlace, mesh: DeviceMesh, control: dist.ProcessGroup) -> None:
        self._place = place
        self.mesh = mesh
        self._control = control

    @property
    def index(self) -> int:
        """Of this process; 0 has the rollouts."""
        return self._place.index

    @property
    def count(self) -> int:
        """How many there are."""
        return self._place.count

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, in float64, the same bits on each."""
        own = torch.tensor(values, dtype=torch.float64)
        return torch.stack(self.gather_tensors(own)).sum(0).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which JSON can hold, by rank."""
        return [_from_bytes(part) for part in self.gather_tensors(_to_bytes(value))]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of one dimension, on the CPU, by rank; lengths may differ."""
        own = tensor.detach().cpu()
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
        data = _to_bytes(value) if self.index == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        dist.broadcast(length, 0, group=self._control)
        data = data if self.index == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        return _from_bytes(data)

    def barrier(self) -> None:
        """Returns when all have come here."""
        self.gather_tensors(torch.zeros(0))


@contextmanager
def open_ranks(
    place: RankPlace, *, exchange_seconds: float = EXCHANGE_SECONDS
) -> Iterator[ProcessRanks]:
    """Meets the other ranks, and leaves them when the block ends without an error.

    After an error others may be in the middle of an exchange, and to leave would be to wait.

    Raises:
        RankLostError: another rank died, or did not come to an exchange in time.
    """
    on_gpu = torch.cuda.is_available()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = _LOOPBACK
    if on_gpu:
        torch.cuda.set_device(0)
    deadline = timedelta(seconds=exchange_seconds)
    with _naming_losses(place, exchange_seconds):
        # A file, not a port: torch's own store would listen on every interface.
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(place.meeting_path, place.count),  # type: ignore[attr-defined]
            rank=place.index,
            world_size=place.count,
            timeout=deadline,
        )
        control = dist.new_group(backend="gloo", timeout=deadline)
        mesh = DeviceMesh("cuda" if on_gpu else "cpu", list(range(place.count)))
        yield ProcessRanks(place, mesh, control)
        dist.destroy_process_group()


@contextmanager
def _naming_losses(place: RankPlace, seconds: float) -> Iterator[None]:
    """Gives errors of exchanges one type, wherever they were raised."""
    try:
        yield
    except RuntimeError as error:
        # gloo has none of its own.
        if not isinstance(error, dist.DistError) and "/gloo/" not in str(error):
            raise
        raise RankLostError(
            f"another of the {place.count} processes that train together has ended, or has not "
            f"answered for {seconds:g} s"
        ) from error


def _to_bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
