"""The policy loss of some targets: pure functions of tensors of trained tokens, [targets] each.

Losses come as sums weighted per token; the weights are made once for the whole minibatch, so that
cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentrl_cli.config.algorithm_config import (
    AlgorithmConfig,
    CispoLossConfig,
    DecoupledPpoLossConfig,
    GspoLossConfig,
    LossConfig,
    PpoClipLossConfig,
    RolloutCorrectionConfig,
    SapoLossConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of the loss of some targets; every tensor has shape [targets]."""

    new_logprobs: Tensor
    """Nats, with gradient."""
    proximal_logprobs: Tensor
    """Nats, of the policy before the step's first update."""
    rollout_logprobs: Tensor
    """Nats, of the policy that sampled, as the engine computed them."""
    is_on_policy: Tensor
    """Bool: the weights from before the step's first update sampled it."""
    advantages: Tensor
    sequence_numbers: Tensor
    """int64: which of the micro-batch's samples the target is of, from 0."""
    token_weights: Tensor
    """The weight of each token's loss, computed for the whole minibatch."""
    ref_logprobs: Tensor | None = None
    """Nats, of the reference policy; needed with ``kl`` in the loss."""
    entropies: Tensor | None = None
    """Nats, with gradient; needed with ``entropy_coef``."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A part of a minibatch's loss, and statistics of its tokens."""

    loss: Tensor
    """Scalar with gradient: the parts of a minibatch add up to its loss."""
    sums: dict[str, Tensor]
    """They add up over parts; ``approx_kl`` is the k3 estimate of KL(policy of the ratio's base ||
    new)."""
    maxima: dict[str, Tensor]
    """``logprob_gap``: the largest |rollout - proximal|, nats; ``importance_weight``: the
    largest before its bounds; 0 without targets."""


def compute_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> LossOutput:
    """These tokens' part of the minibatch's loss, with statistics.

    Per token: rollout correction x policy loss + kl coef x KL - entropy coef x entropy; then the
    sum over targets, weighted by ``token_weights``. Without a rollout correction the statistics
    are those of the default one, which says how far off policy the tokens are all the same.

    Raises:
        ValueError: a term is set and its input is missing.
    """
    proximal = inputs.proximal_logprobs.detach()
    gap = (inputs.rollout_logprobs - proximal).detach().abs()
    if algorithm.on_policy_logprobs == "proximal":
        # Of the same weights: importance weight and ratio are free of the engine's rounding.
        sampled = torch.where(inputs.is_on_policy, proximal, inputs.rollout_logprobs)
        inputs = replace(inputs, rollout_logprobs=sampled)
    policy = compute_policy_loss(algorithm.loss, inputs)
    correction = compute_rollout_correction(
        proximal,
        inputs.rollout_logprobs,
        inputs.sequence_numbers,
        algorithm.rollout_correction or RolloutCorrectionConfig(),
    )
    token_losses = policy.losses
    if algorithm.rollout_correction is not None:
        token_losses = correction.weights * policy.losses
    kl = torch.zeros_like(token_losses)
    if algorithm.kl is not None and algorithm.has_kl_loss:
        if inputs.ref_logprobs is None:
            raise ValueError("kl is in the loss: compute_loss needs ref_logprobs")
        kl = compute_kl(algorithm.kl.estimator, inputs.new_logprobs, inputs.ref_logprobs.detach())
        token_losses = token_losses + algorithm.kl.coef * kl
    if algorithm.entropy_coef > 0:
        if inputs.entropies is None:
            raise ValueError("entropy_coef is set: compute_loss needs entropies")
        token_losses = token_losses - algorithm.entropy_coef * inputs.entropies
    return LossOutput(
        loss=(token_losses * inputs.token_weights).sum(),
        sums={
            "approx_kl": (policy.log_ratio.expm1() - policy.log_ratio).sum(),
            "clipfrac": policy.is_clipped.sum().float(),
            "kl": kl.detach().sum(),
            "logprob_gap": gap.sum(),
            "importance_weight": correction.weights.sum(),
            "importance_weight_squared": correction.weights.square().sum(),
            "importance_weight_clipped": correction.is_clipped.sum().float(),
        },
        maxima={
            "logprob_gap": _find_largest(gap),
            "importance_weight": _find_largest(correction.raw_weights),
        },
    )


def _find_largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss of each token, and whether its ratio was clipped; every tensor is [targets]."""

    losses: Tensor
    """With gradient."""
    log_ratio: Tensor
    """Nats, without gradient: of the new policy to the one in the ratio's denominator."""
    is_clipped: Tensor
    """Bool: the clip bounds the ratio or removes the gradient."""


def compute_policy_loss(config: LossConfig, inputs: LossInputs) -> PolicyLoss:
    """The loss that ``config`` names."""
    new, advantages = inputs.new_logprobs, inputs.advantages
    proximal = inputs.proximal_logprobs.detach()
    if isinstance(config, PpoClipLossConfig):
        log_ratio = compute_log_ratio(new, inputs.rollout_logprobs)
        return compute_clipped_loss(log_ratio, advantages, config)
    if isinstance(config, GspoLossConfig):
        log_ratio = compute_sequence_log_ratio(new, proximal, inputs.sequence_numbers)
        return compute_clipped_loss(log_ratio, advantages, config)
    log_ratio = compute_log_ratio(new, proximal)
    if isinstance(config, DecoupledPpoLossConfig):
        return compute_clipped_loss(log_ratio, advantages, config)
    if isinstance(config, CispoLossConfig):
        return compute_cispo_loss(new, log_ratio.detach(), advantages, config)
    if isinstance(config, SapoLossConfig):
        losses = compute_sapo_losses(log_ratio, advantages, config)
    else:
        # REINFORCE (Williams 1992, theorem 1).
        losses = -advantages * new
    return PolicyLoss(losses, log_ratio.detach(), torch.zeros_like(advantages, dtype=torch.bool))


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
    """The mean log ratio of each token's sequence, nats, with the gradient of the token alone.

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


def compute_sapo_losses(log_ratio: Tensor, advantages: Tensor, config: SapoLossConfig) -> Tensor:
    """-(4 / t) sigmoid(t (r - 1)) A, with the temperature t by the sign of A (SAPO, arXiv
    2511.20347, equations 5 and 6). At r = 1 its gradient is that of the unclipped objective."""
    temperatures = torch.where(
        advantages > 0, config.positive_temperature, config.negative_temperature
    )
    return -4.0 / temperatures * torch.sigmoid(temperatures * (log_ratio.exp() - 1.0)) * advantages


#: exp(20) is 5e8: beyond it a ratio says only "very far", and float32 nears overflow.
MAX_LOG_RATIO = 20.0


def compute_log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``logprobs - base_logprobs`` within ±20 nats."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sum_over_sequences(values: Tensor, sequence_numbers: Tensor) -> Tensor:
    """The sum of ``values`` over each token's own sequence, repeated for its tokens: [targets].

    Each of ``sequence_numbers`` is below the number of targets.
    """
    totals = torch.zeros_like(values).index_add(0, sequence_numbers, values)
    return totals[sequence_numbers]


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Weights of tokens that another policy sampled; [targets], without gradient."""

    weights: Tensor
    raw_weights: Tensor
    """Before bounds."""
    is_clipped: Tensor
    """Bool: outside of the bounds, so clamped or masked."""


def compute_rollout_correction(
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_numbers: Tensor,
    config: RolloutCorrectionConfig,
) -> RolloutCorrection:
    """exp(proximal - rollout) within bounds.

    The behaviour correction of decoupled PPO (arXiv 2110.00641; arXiv 2505.24298, section 5.2).
    Clamped at ``cap`` like the weights of V-trace (arXiv 1802.01561, section 4.1); masked outside
    [floor, cap] as in IcePop (arXiv 2510.18855, section 2.3.2). At the level
    ``sequence`` it is the product over the sample's tokens: what older weights sampled in it weighs
    on what newer ones continued.
    """
    gap = (proximal_logprobs - rollout_logprobs).detach()
    if config.level == "sequence":
        gap = sum_over_sequences(gap, sequence_numbers)
    raw = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    floor = 0.0 if config.floor is None else config.floor
    is_clipped = (raw > config.cap) | (raw < floor)
    clamped = raw.clamp(floor, config.cap)
    weights = clamped if config.mode == "clamp" else raw.masked_fill(is_clipped, 0.0)
    return RolloutCorrection(weights, raw, is_clipped)


KlEstimator = Literal["k1", "k2", "k3"]


def compute_kl(estimator: KlEstimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimate per token, in nats (Schulman, "Approximating KL divergence", 2020).

    With d = logprobs - ref_logprobs: k1 = d, unbiased, of either sign; k2 = d² / 2, whose
    gradient is unbiased; k3 = exp(-d) + d - 1, unbiased and never negative (GRPO, arXiv
    2402.03300, equation 4).
    """
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2.0
    log_ratio = compute_log_ratio(ref_logprobs, logprobs)
    return log_ratio.expm1() - log_ratio
