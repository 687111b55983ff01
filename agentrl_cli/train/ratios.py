"""Ratios of probabilities, and the weights that correct for who sampled: [targets] tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.config.algorithm import RolloutCorrectionConfig

#: exp(20) is 5e8: beyond it a ratio says only "very far", and float32 nears overflow.
MAX_LOG_RATIO = 20.0


def compute_log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``logprobs - base_logprobs`` within ±20 nats."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sum_over_sequences(values: Tensor, sequence_numbers: Tensor) -> Tensor:
    """The sum of ``values`` over each token's own sequence, repeated for its tokens: [targets].

    Args:
        values: float [targets].
        sequence_numbers: int64 [targets], each below the number of targets.
    """
    totals = torch.zeros_like(values).index_add(0, sequence_numbers, values)
    return totals[sequence_numbers]


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """How to weigh tokens that another policy sampled; [targets], without gradient."""

    weights: Tensor
    raw_weights: Tensor
    """Before bounds."""
    is_dropped: Tensor
    """Bool: masked out."""


def compute_rollout_correction(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_numbers: Tensor,
    config: RolloutCorrectionConfig | None,
) -> RolloutCorrection:
    """exp(proximal - rollout) within bounds; all 1 without ``config``.

    The behaviour correction of decoupled PPO (arXiv 2110.00641; arXiv 2505.24298, section 5.2).
    Clamped at ``cap`` like the weights of V-trace (arXiv 1802.01561, section 4.1); masked outside
    [floor, cap] as in IcePop (arXiv 2510.18855, section 2.3.2). At the level
    ``sequence`` it is the product over the sample's tokens. It corrects for older weights as for
    the numerics of the engine, and is 1 where rollout and trainer agree.
    """
    if config is None:
        ones = torch.ones_like(proximal_logprobs)
        return RolloutCorrection(ones, ones, torch.zeros_like(ones, dtype=torch.bool))
    gap = (proximal_logprobs - rollout_logprobs).detach()
    if config.level == "sequence":
        gap = sum_over_sequences(gap, sequence_numbers)
    raw = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    floor = 0.0 if config.floor is None else config.floor
    if config.mode == "clamp":
        return RolloutCorrection(
            raw.clamp(floor, config.cap), raw, torch.zeros_like(raw, dtype=torch.bool)
        )
    is_dropped = (raw > config.cap) | (raw < floor)
    return RolloutCorrection(raw.masked_fill(is_dropped, 0.0), raw, is_dropped)
