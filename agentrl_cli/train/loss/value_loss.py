"""The critic's loss, and how much of the returns it explains: pure functions of targets' tensors.

Every tensor is float32 of shape [targets].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """A part of a minibatch's value loss, and how many of its targets are clipped."""

    loss: Tensor
    """Scalar with gradient: the parts of a minibatch add up to its loss."""
    num_clipped: Tensor
    """Targets whose gradient the clip removes."""


def compute_value_loss(
    new_values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_range: float | None,
    num_targets: int,
) -> ValueLoss:
    """The sum of max((V - R)², (clip(V, V_old ± clip_range) - R)²) / 2, over ``num_targets``.

    PPO's value loss (arXiv 1707.06347, equation 9) with the clip of its reference implementation
    (arXiv 2005.12729, section 3): a value that is farther than ``clip_range`` from the old one, on
    the side of its return, has no gradient.

    Args:
        new_values: the critic's, with gradient.
        old_values: from before the step's first update.
        returns: what values should be.
        clip_range: in units of the reward; None: no clip.
        num_targets: of the whole minibatch.
    """
    squares = (new_values - returns) ** 2
    if clip_range is None:
        return ValueLoss(squares.sum() / (2 * num_targets), squares.new_zeros(()))
    clipped = old_values + (new_values - old_values).clamp(-clip_range, clip_range)
    clipped_squares = (clipped - returns) ** 2
    num_clipped = (clipped_squares > squares).sum().float()
    larger = torch.maximum(squares, clipped_squares)
    return ValueLoss(larger.sum() / (2 * num_targets), num_clipped)


def compute_explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows nothing,
    below 0 a harmful one; None where returns do not vary."""
    if returns.numel() == 0:
        return None
    variance = returns.double().var(correction=0)
    if variance <= 1e-12 * returns.double().square().mean():
        return None
    residual = (returns.double() - values.double()).var(correction=0)
    return float(1.0 - residual / variance)
