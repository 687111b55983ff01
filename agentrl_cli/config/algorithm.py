"""Training algorithms and their coefficients, chosen by ``kind``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


class GrpoConfig(StrictConfig):
    """Group relative policy optimization (DeepSeekMath, arXiv 2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (DAPO, arXiv 2503.14476, uses 0.28)."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound of the loss for negative advantages (arXiv 1912.09729); null: off."""
    kl_coef: float = Field(0.0, ge=0.0)
    """Weight of the k3 estimate of KL(policy || reference), per token; 0: no reference model."""
    importance_cap: float = Field(2.0, gt=0.0)
    """Cap of exp(proximal - rollout), which corrects for sampling with older weights
    (decoupled PPO, arXiv 2505.24298)."""
    aggregation: Literal["token_mean", "trajectory_mean", "constant"] = "token_mean"
    """How per-token losses of the whole batch become one number."""
    constant_denominator: float | None = Field(None, gt=0.0)
    """Divisor per trajectory for ``constant``; null: gconfig.max_tokens."""
