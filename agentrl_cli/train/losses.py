"""Policy losses: pure functions of the tensors of trained tokens, float32 of shape [targets].

Losses come as sums weighted per token; the weights are made once for the whole batch, so that
cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl_cli.config.algorithm import GrpoConfig

Aggregation = Literal["token_mean", "trajectory_mean", "constant"]

#: exp(20) is 5e8: beyond it a ratio says only "very far", and float32 nears overflow.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of some targets is made of; every tensor has shape [targets]."""

    new_logprobs: Tensor
    """Nats, with gradient."""
    proximal_logprobs: Tensor
    """Nats, of the policy before the step's first update."""
    rollout_logprobs: Tensor
    """Nats, of the policy that sampled."""
    advantages: Tensor
    token_weights: Tensor
    """What each token's loss counts in the batch's: :func:`compute_token_weights`."""
    ref_logprobs: Tensor | None = None
    """Nats, of the reference policy; needed when ``kl_coef`` is not 0."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A part of the batch's loss, and statistics that add up over parts."""

    loss: Tensor
    """Scalar with gradient: the parts of a batch add up to its loss."""
    sums: dict[str, Tensor]
    """Sums over the targets: ``approx_kl``, ``clipfrac``, ``kl``, ``logprob_gap``."""
    logprob_gap_max: Tensor
    """Largest |rollout - proximal|, nats; 0 without targets."""


def compute_log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """``logprobs - base_logprobs`` within ±20 nats."""
    return (logprobs - base_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def compute_clipped_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate objective per token, to be maximized.

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO (arXiv 1707.06347, equation 7)
    with the asymmetric range of DAPO (arXiv 2503.14476, section 3.1). With ``dual_clip``
    c > 1, for A < 0 only, at least c A: dual-clip PPO (arXiv 1912.09729).
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return objective
    bounded = torch.maximum(objective, dual_clip * advantages)
    return torch.where(advantages < 0, bounded, objective)


def compute_importance_weights(
    proximal_logprobs: Tensor, rollout_logprobs: Tensor, importance_cap: float
) -> Tensor:
    """min(exp(proximal - rollout), cap), without gradient: how to weigh tokens that another
    policy sampled.

    The behaviour correction of decoupled PPO (arXiv 2110.00641; arXiv 2505.24298, section
    5.2), truncated like the weights of V-trace (arXiv 1802.01561, section 4.1). It corrects
    older weights as well as the numerics of the engine, and is 1 when rollout and trainer agree.
    """
    log_weight = compute_log_ratio(proximal_logprobs, rollout_logprobs)
    return log_weight.exp().clamp(max=importance_cap).detach()


def compute_k3(new_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(new || ref) per token: exp(ref - new) - (ref - new) - 1, never
    negative (Schulman, "Approximating KL divergence"; GRPO, arXiv 2402.03300, equation 4)."""
    log_ratio = compute_log_ratio(ref_logprobs, new_logprobs)
    return log_ratio.exp() - log_ratio - 1.0


def compute_token_weights(
    aggregation: Aggregation, tokens_per_trajectory: Sequence[int], constant_denominator: float
) -> list[float]:
    """What each token of each trajectory counts in the loss of the whole batch.

    Args:
        aggregation: ``token_mean``: every token alike, 1 / tokens (DAPO, section 3.3);
            ``trajectory_mean``: every trajectory alike, 1 / (trajectories x its tokens)
            (GRPO, equation 3); ``constant``: 1 / (trajectories x ``constant_denominator``)
            (Dr. GRPO, arXiv 2503.20783, section 3.2).
        tokens_per_trajectory: trained tokens of every scored trajectory of the batch,
            those with advantage 0 included: they stay in the denominator.
        constant_denominator: tokens, for ``constant``.
    """
    if not tokens_per_trajectory:
        return []
    if aggregation == "token_mean":
        return [1.0 / max(sum(tokens_per_trajectory), 1)] * len(tokens_per_trajectory)
    num_trajectories = len(tokens_per_trajectory)
    if aggregation == "constant":
        return [1.0 / (num_trajectories * constant_denominator)] * num_trajectories
    # A trajectory without trained tokens still is one of the mean.
    return [1.0 / (num_trajectories * max(count, 1)) for count in tokens_per_trajectory]


def compute_loss(inputs: LossInputs, algorithm: GrpoConfig) -> LossOutput:
    """The part that these tokens have in the batch's loss, with statistics.

    Per token: -w min(r A, clip(r) A) + kl_coef k3, with r = exp(new - proximal) and
    w = min(exp(proximal - rollout), importance_cap); then the sum over targets,
    weighted by ``token_weights``.

    Raises:
        ValueError: ``kl_coef`` is set and there are no reference logprobs.
    """
    advantages = inputs.advantages
    proximal = inputs.proximal_logprobs.detach()
    log_ratio = compute_log_ratio(inputs.new_logprobs, proximal)
    objective = compute_clipped_objective(
        log_ratio,
        advantages,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
    )
    importance = compute_importance_weights(
        proximal, inputs.rollout_logprobs, algorithm.importance_cap
    )
    token_loss = -importance * objective
    kl = torch.zeros_like(token_loss)
    if algorithm.kl_coef > 0:
        if inputs.ref_logprobs is None:
            raise ValueError("kl_coef is set: compute_loss needs ref_logprobs")
        kl = compute_k3(inputs.new_logprobs, inputs.ref_logprobs.detach())
        token_loss = token_loss + algorithm.kl_coef * kl
    loss = (token_loss * inputs.token_weights).sum()
    return _with_statistics(loss, inputs, log_ratio.detach(), kl.detach(), algorithm)


@torch.no_grad()
def _with_statistics(
    loss: Tensor, inputs: LossInputs, log_ratio: Tensor, kl: Tensor, algorithm: GrpoConfig
) -> LossOutput:
    """``approx_kl`` is the k3 estimate of KL(proximal || new); ``clipfrac`` counts the tokens
    whose gradient the clip removes."""
    ratio = log_ratio.exp()
    advantages = inputs.advantages
    is_clipped = ((advantages > 0) & (ratio > 1.0 + algorithm.clip_high)) | (
        (advantages < 0) & (ratio < 1.0 - algorithm.clip_low)
    )
    gap = (inputs.rollout_logprobs - inputs.proximal_logprobs).abs()
    sums = {
        "approx_kl": (ratio - 1.0 - log_ratio).sum(),
        "clipfrac": is_clipped.sum().float(),
        "kl": kl.sum(),
        "logprob_gap": gap.sum(),
    }
    return LossOutput(loss, sums, gap.max() if gap.numel() else gap.new_zeros(()))
