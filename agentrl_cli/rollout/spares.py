"""The rows whose tasks may take the place of others in a batch."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from itertools import cycle, islice


def choose_spares(
    num_rows: int,
    batch: Sequence[int],
    count: int,
    *,
    left_out: Collection[int] = (),
    shuffle_key: str | None = None,
) -> list[int]:
    """``count`` rows, in order of use; each once before any comes again.

    They are rows outside ``batch`` and ``left_out`` while there are any, else all rows.

    Args:
        num_rows: of the dataset.
        batch: the rows of the batch.
        count: how many are wanted.
        left_out: rows that rest.
        shuffle_key: what they are drawn by; None: those that follow the batch, in order.
    """
    if count == 0:
        return []
    after = (batch[-1] + 1) % num_rows
    rows = [*range(after, num_rows), *range(after)]
    taken = {*batch, *left_out}
    fresh = [index for index in rows if index not in taken] or rows
    if shuffle_key is None:
        return list(islice(cycle(fresh), count))
    return _draw(fresh, count, random.Random(shuffle_key))


def _draw(indices: Sequence[int], count: int, generator: random.Random) -> list[int]:
    drawn: list[int] = []
    left: list[int] = []
    while len(drawn) < count:
        left = left or list(indices)
        # Of a generator's methods only random() gives the same numbers in every Python version.
        place = int(generator.random() * len(left))
        left[place], left[-1] = left[-1], left[place]
        drawn.append(left.pop())
    return drawn
