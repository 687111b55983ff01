"""Which rank passes which samples through the model."""

from __future__ import annotations

from collections.abc import Sequence


def divide_evenly(costs: Sequence[int], count: int) -> list[range]:
    """``count`` runs of neighbours that cover all positions, the costliest as cheap as can be.

    Neighbours stay together because samples of one group share prefixes, which are computed once
    by the rank that has them. The costliest run is above the mean by less than the largest cost.
    Runs may be empty. The result depends on the arguments only.

    Args:
        costs: of each sample, not negative: its tokens.
        count: of ranks.
    """
    if count < 1:
        raise ValueError(f"count is {count}: there is at least one rank")
    lowest, highest = max([*costs, -(-sum(costs) // count)]), sum(costs)
    while lowest < highest:
        middle = (lowest + highest) // 2
        if len(_cut(costs, middle)) <= count:
            highest = middle
        else:
            lowest = middle + 1
    runs = _cut(costs, lowest)
    return runs + [range(len(costs), len(costs))] * (count - len(runs))


def _cut(costs: Sequence[int], limit: int) -> list[range]:
    """Runs of at most ``limit``, which is no less than any cost, each as long as can be."""
    runs: list[range] = []
    start, total = 0, 0
    for position, cost in enumerate(costs):
        if total + cost > limit:
            runs.append(range(start, position))
            start, total = position, 0
        total += cost
    runs.append(range(start, len(costs)))
    return runs
