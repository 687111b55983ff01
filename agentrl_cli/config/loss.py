"""Policy losses, chosen by ``kind``: what is minimized for each trained token."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


class PpoClipLossConfig(StrictConfig):
    """PPO's clipped objective with the ratio new / rollout (arXiv 1707.06347, equation 7)."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (DAPO, arXiv 2503.14476, uses 0.28)."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound of the loss for negative advantages (arXiv 1912.09729); null: off."""


class DecoupledPpoLossConfig(StrictConfig):
    """PPO's clipped objective with the ratio new / proximal, so that stale tokens are not clipped
    for being stale (arXiv 2110.00641; arXiv 2505.24298, section 5.2)."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (DAPO, arXiv 2503.14476, uses 0.28)."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound of the loss for negative advantages (arXiv 1912.09729); null: off."""


class GspoLossConfig(StrictConfig):
    """The clipped objective with one ratio new / proximal per sample, the geometric mean of its
    tokens' (GSPO, arXiv 2507.18071, equations 5 to 7, in the form of its equation 13)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3.0e-4, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(4.0e-4, gt=0.0)
    """The ratio is clipped above at 1 + clip_high."""


class CispoLossConfig(StrictConfig):
    """The clipped ratio new / proximal as a weight without gradient, so that clipped tokens still
    teach (CISPO, MiniMax-M1, arXiv 2506.13585, equations 4 and 5)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float | None = Field(None, gt=0.0, lt=1.0)
    """The weight is clipped below at 1 - clip_low; null: not at all, as in the paper."""
    clip_high: float = Field(4.0, gt=0.0)
    """The weight is clipped above at 1 + clip_high (4.0: at 5, as in ScaleRL, arXiv
    2510.13786)."""


class SapoLossConfig(StrictConfig):
    """A soft gate of the ratio new / proximal instead of a clip (SAPO, arXiv 2511.20347, equations
    5 and 6)."""

    kind: Literal["sapo"] = "sapo"
    positive_temperature: float = Field(1.0, gt=0.0)
    """How fast the gate closes away from ratio 1, for advantages above 0."""
    negative_temperature: float = Field(1.05, gt=0.0)
    """The same for the others; above ``positive_temperature`` it is steadier."""


class ReinforceLossConfig(StrictConfig):
    """-advantage x new logprob, without ratio and clip (Williams, 1992)."""

    kind: Literal["reinforce"] = "reinforce"


LossConfig = (
    PpoClipLossConfig
    | DecoupledPpoLossConfig
    | GspoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | ReinforceLossConfig
)
