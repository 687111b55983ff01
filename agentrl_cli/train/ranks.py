"""The processes that train one model together ("ranks"), as the code of an update sees them.

How several ranks make one update, which is that of one process:

- Every rank holds a shard of the weights, of the optimizer's state and of nothing else (FSDP2,
  ``sharding.py``). Rank 0 also has everything that a single trainer has: rollouts, the engine,
  metrics, checkpoints. The others follow what it commands (``commands.py``): they read the step's
  trajectories from the run folder, where they are before they are trained on.
- Every rank builds all samples of the step, and so the same advantages and denominators; of each
  minibatch it passes its own share through the model (``shares.py``). The parts of the loss add
  up, so gradients are summed over ranks, never averaged.
- A pass through a sharded model is a sequence of exchanges in which all ranks take part. So all
  make equally many passes: who has fewer micro-batches makes passes of nothing, whose gradient is
  0; and what goes wrong on one rank alone (a loss that is not finite) stops all of them at the end
  of the minibatch, with one message. Forward passes for probes are shared out in the same way.
- What needs the whole model (publication, checkpoint, diagnosis) works on a copy that rank 0
  gathers parameter by parameter; the other ranks never hold more than one whole parameter. So a
  checkpoint is the files that one process writes, and any number of ranks reads it.
- Every exchange has a deadline. A rank that fails or dies leaves the others waiting, at most until
  then: the command that started them ends them all and starts them again from the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Ranks(Protocol):
    """What the ranks tell each other; every method is called by all of them, in one order."""

    @property
    def index(self) -> int:
        """Of this process; 0 has the rollouts."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over the ranks, in float64, the same bits on each."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which JSON can hold, by rank."""
        ...

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of one dimension, on the CPU, by rank; lengths may differ."""
        ...

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0, which JSON can hold; that of others does not matter."""
        ...

    def barrier(self) -> None:
        """Returns when all have come here."""
        ...


class SingleRank:
    """A process that trains alone."""

    index = 0
    count = 1

    def sum(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def gather_objects(self, value: Any) -> list[Any]:
        """The value."""
        return [value]

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """The tensor."""
        return [tensor.cpu()]

    def broadcast(self, value: Any) -> Any:
        """The value."""
        return value

    def barrier(self) -> None:
        """Returns at once."""


SINGLE: Ranks = SingleRank()
