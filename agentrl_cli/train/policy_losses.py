"""Policy losses per token: pure functions of [targets] tensors, to be minimized.

They know nothing of weights and denominators: ``losses.py`` puts those on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.config.loss import (
    CispoLossConfig,
    DecoupledPpoLossConfig,
    GspoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    SapoLossConfig,
)
from agentrl_cli.train.ratios import MAX_LOG_RATIO, compute_log_ratio, sum_over_sequences


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token, and what was done to its ratio; every tensor is [targets]."""

    losses: Tensor
    """With gradient."""
    log_ratio: Tensor
    """Nats, without gradient: of the new policy to the one that the ratio is against."""
    is_clipped: Tensor
    """Bool: the clip holds the ratio or removes the gradient."""


def compute_policy_loss(
    config: LossConfig,
    new_logprobs: Tensor,
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    sequence_numbers: Tensor,
) -> PolicyLoss:
    """The loss that ``config`` names."""
    if isinstance(config, PpoClipLossConfig):
        log_ratio = compute_log_ratio(new_logprobs, rollout_logprobs)
        return compute_clipped_loss(log_ratio, advantages, config)
    if isinstance(config, GspoLossConfig):
        log_ratio = compute_sequence_log_ratio(new_logprobs, proximal_logprobs, sequence_numbers)
        return compute_clipped_loss(log_ratio, advantages, config)
    log_ratio = compute_log_ratio(new_logprobs, proximal_logprobs)
    if isinstance(config, DecoupledPpoLossConfig):
        return compute_clipped_loss(log_ratio, advantages, config)
    if isinstance(config, CispoLossConfig):
        return compute_cispo_loss(new_logprobs, log_ratio.detach(), advantages, config)
    if isinstance(config, SapoLossConfig):
        return compute_sapo_loss(log_ratio, advantages, config)
    return PolicyLoss(
        compute_reinforce_losses(new_logprobs, advantages),
        log_ratio.detach(),
        torch.zeros_like(advantages, dtype=torch.bool),
    )


def compute_clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    config: PpoClipLossConfig | DecoupledPpoLossConfig | GspoLossConfig,
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO (arXiv 1707.06347, equation 7) with the asymmetric range of DAPO (arXiv 2503.14476,
    equation 10). With ``dual_clip`` c > 1, for A < 0 only, at most -c A: dual-clip PPO (arXiv
    1912.09729, equation 5).
    """
    ratio = log_ratio.exp()
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    objective = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    is_clipped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    dual_clip = None if isinstance(config, GspoLossConfig) else config.dual_clip
    if dual_clip is not None:
        is_bounded = (advantages < 0) & (ratio > dual_clip)
        objective = torch.where(is_bounded, dual_clip * advantages, objective)
        is_clipped = is_clipped | is_bounded
    return PolicyLoss(-objective, log_ratio.detach(), is_clipped)


def compute_sequence_log_ratio(
    new_logprobs: Tensor, proximal_logprobs: Tensor, sequence_numbers: Tensor
) -> Tensor:
    """The mean log ratio of each token's sequence, nats; its gradient is that of the token alone.

    GSPO (arXiv 2507.18071, equation 7) in the form of GSPO-token (equation 14): with one advantage
    for the whole sequence both have the same gradient, and with an advantage for each turn no
    turn is moved by another's.
    """
    difference = (new_logprobs - proximal_logprobs).detach()
    counts = sum_over_sequences(torch.ones_like(difference), sequence_numbers)
    means = sum_over_sequences(difference, sequence_numbers) / counts
    # Exactly 0, so that means, far smaller than logprobs, are not rounded to their precision.
    own_gradient = new_logprobs - new_logprobs.detach()
    return means.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own_gradient


def compute_cispo_loss(
    new_logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, config: CispoLossConfig
) -> PolicyLoss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log p: every token keeps its gradient
    (MiniMax-M1, arXiv 2506.13585, equations 4 and 5)."""
    low = 0.0 if config.clip_low is None else 1.0 - config.clip_low
    high = 1.0 + config.clip_high
    ratio = log_ratio.detach().exp()
    losses = -ratio.clamp(low, high) * advantages * new_logprobs
    return PolicyLoss(losses, log_ratio.detach(), (ratio < low) | (ratio > high))


def compute_sapo_loss(log_ratio: Tensor, advantages: Tensor, config: SapoLossConfig) -> PolicyLoss:
    """-(4 / t) sigmoid(t (r - 1)) A, with the temperature t by the sign of A (SAPO, arXiv
    2511.20347, equations 5 and 6). At r = 1 its gradient is that of the unclipped objective."""
    temperatures = torch.where(
        advantages > 0, config.positive_temperature, config.negative_temperature
    )
    gate = 4.0 / temperatures * torch.sigmoid(temperatures * (log_ratio.exp() - 1.0))
    return PolicyLoss(
        -gate * advantages, log_ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool)
    )


def compute_reinforce_losses(new_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p (REINFORCE, Williams 1992, theorem 1)."""
    return -advantages * new_logprobs
