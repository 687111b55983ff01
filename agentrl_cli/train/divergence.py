"""Estimates of KL(policy || reference) from sampled tokens: [targets] tensors."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from agentrl_cli.train.ratios import compute_log_ratio

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
