"""The loss of some targets: pure functions of tensors of trained tokens, of shape [targets].

Losses come as sums weighted per token; the weights are made once for the whole minibatch, so that
cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl_cli.config.algorithm import AlgorithmConfig
from agentrl_cli.train.divergence import compute_kl
from agentrl_cli.train.policy_losses import PolicyLoss, compute_policy_loss
from agentrl_cli.train.ratios import RolloutCorrection, compute_rollout_correction


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
    sequence_numbers: Tensor
    """int64: which of the micro-batch's samples the target is of, from 0."""
    token_weights: Tensor
    """What each token's loss counts: :func:`agentrl_cli.train.aggregation.compute_token_weights`"""
    ref_logprobs: Tensor | None = None
    """Nats, of the reference policy; needed with ``kl`` in the loss."""
    entropies: Tensor | None = None
    """Nats, with gradient; needed with ``entropy_coef``."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """A part of the minibatch's loss, and statistics of its tokens."""

    loss: Tensor
    """Scalar with gradient: the parts of a minibatch add up to its loss."""
    sums: dict[str, Tensor]
    """They add up over parts: ``approx_kl``, ``clipfrac``, ``kl``, ``logprob_gap``,
    ``rollout_correction``, ``rollout_correction_dropped``."""
    maxima: dict[str, Tensor]
    """``logprob_gap``: the largest |rollout - proximal|, nats; ``rollout_correction``: the
    largest weight before its cap; 0 without targets."""


def compute_loss(inputs: LossInputs, algorithm: AlgorithmConfig) -> LossOutput:
    """The part that these tokens have in the minibatch's loss, with statistics.

    Per token: rollout correction x policy loss + kl coef x KL - entropy coef x entropy; then the
    sum over targets, weighted by ``token_weights``.

    Raises:
        ValueError: a term is set and what it is made of is missing.
    """
    proximal = inputs.proximal_logprobs.detach()
    policy = compute_policy_loss(
        algorithm.loss,
        inputs.new_logprobs,
        proximal,
        inputs.rollout_logprobs,
        inputs.advantages,
        inputs.sequence_numbers,
    )
    correction = compute_rollout_correction(
        proximal, inputs.rollout_logprobs, inputs.sequence_numbers, algorithm.rollout_correction
    )
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
    loss = (token_losses * inputs.token_weights).sum()
    return _with_statistics(loss, inputs, policy, correction, kl.detach())


def _with_statistics(
    loss: Tensor,
    inputs: LossInputs,
    policy: PolicyLoss,
    correction: RolloutCorrection,
    kl: Tensor,
) -> LossOutput:
    """``approx_kl`` is the k3 estimate of KL(policy of the ratio's base || new)."""
    gap = (inputs.rollout_logprobs - inputs.proximal_logprobs).detach().abs()
    sums = {
        "approx_kl": (policy.log_ratio.expm1() - policy.log_ratio).sum(),
        "clipfrac": policy.is_clipped.sum().float(),
        "kl": kl.sum(),
        "logprob_gap": gap.sum(),
        "rollout_correction": correction.weights.sum(),
        "rollout_correction_dropped": correction.is_dropped.sum().float(),
    }
    maxima = {
        "logprob_gap": _find_largest(gap),
        "rollout_correction": _find_largest(correction.raw_weights),
    }
    return LossOutput(loss, sums, maxima)


def _find_largest(values: Tensor) -> Tensor:
    return values.max() if values.numel() else values.new_zeros(())
