"""Rewards of interactions: reading what users return, and handing credit down the tree."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

from agentrl_cli.records import Interaction, InteractionStatus


def parse_reward(value: Any) -> float | None:
    """A reward as a float; None (unscored) for None and NaN.

    Accepts numbers of any library: bool, int, float, numpy scalars, 0-d tensors.

    Raises:
        TypeError: ``value`` is no number.
        ValueError: ``value`` is infinite, or too large for a float.
    """
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"a reward must be a number, a bool or None (unscored), not "
            f"{type(value).__name__}: {value!r:.200}"
        )
    try:
        reward = float(value)
    except OverflowError as error:
        raise ValueError(f"a reward must be finite, not a number this large: {error}") from None
    if math.isnan(reward):
        return None
    if math.isinf(reward):
        raise ValueError(f"a reward must be finite, not {reward}")
    return reward


def compute_turn_returns(
    interactions: Iterable[Interaction], turn_discount: float
) -> dict[str, float]:
    """The return of every completed interaction: reward + turn_discount x successors' mean.

    Whatever was sampled shares in the outcome: see :func:`find_successors`. Empty when no
    interaction has a reward.
    """
    by_id = {i.id: i for i in interactions}
    successors = find_successors(by_id.values())
    if all(by_id[interaction_id].reward is None for interaction_id in successors):
        return {}
    returns: dict[str, float] = {}
    for interaction_id, later in successors.items():
        credit = sum(returns[s] for s in later) / len(later) if later else 0.0
        returns[interaction_id] = (by_id[interaction_id].reward or 0.0) + turn_discount * credit
    return returns


def find_successors(interactions: Iterable[Interaction]) -> dict[str, tuple[str, ...]]:
    """Whose credit every completed interaction shares in, by ids; successors come first.

    Successors are an interaction's children in the conversation tree. A leaf without a
    reward of its own hands over to the first interaction that started after it ended
    (a handoff, a sub-agent's end, a compacted history); where none did (calls made in
    parallel at the end), to the trajectory's last interaction.
    """
    completed = sorted(
        (i for i in interactions if i.status is InteractionStatus.COMPLETED),
        key=lambda i: i.started,
    )
    children: dict[str, list[str]] = {}
    for interaction in completed:
        if interaction.parent_id is not None:
            children.setdefault(interaction.parent_id, []).append(interaction.id)
    last = max(completed, key=_end, default=None)
    found: dict[str, tuple[str, ...]] = {}
    if last is None:
        return found

    # A successor starts after its predecessor ended, so walking backwards in order of
    # start meets it first. The last interaction to end has no successor of its own.
    for interaction in [last, *reversed(completed)]:
        if interaction.id in found:
            continue
        successors = tuple(children.get(interaction.id, ()))
        if not successors and interaction.reward is None and interaction is not last:
            later = (i for i in completed if i.started > _end(interaction))
            successors = (next(later, last).id,)
        found[interaction.id] = successors
    return found


def _end(interaction: Interaction) -> int:
    return interaction.ended if interaction.ended is not None else interaction.started
