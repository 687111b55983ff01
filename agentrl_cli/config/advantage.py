"""Advantages, chosen by ``kind``: how much better than expected an interaction was."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from agentrl_cli.config.base import StrictConfig


class GrpoAdvantageConfig(StrictConfig):
    """(return - group mean) / group deviation (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""

    kind: Literal["grpo"] = "grpo"


class DrGrpoAdvantageConfig(StrictConfig):
    """return - group mean, not divided (Dr. GRPO, arXiv 2503.20783, section 3.2)."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RlooAdvantageConfig(StrictConfig):
    """return - mean of the group's other trajectories (RLOO, arXiv 2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class ReinforcePlusPlusAdvantageConfig(StrictConfig):
    """(return - baseline) / deviation over the batch (REINFORCE++, arXiv 2501.03262)."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["group", "batch"] = "group"
    """``group``: the group's mean; ``batch``: the batch's mean, as if it were one group: works with
    gconfig.n_samples=1."""


class MaxRlAdvantageConfig(StrictConfig):
    """(return - group mean) / group mean, for rewards of 0 and above (MaxRL, arXiv 2602.02710)."""

    kind: Literal["maxrl"] = "maxrl"


class GaeAdvantageConfig(StrictConfig):
    """Generalized advantage estimation with a critic (arXiv 1506.02438, equation 16)."""

    kind: Literal["gae"] = "gae"
    gae_lambda: float = Field(1.0, ge=0.0, le=1.0)
    """Weight of later rewards against the critic's word; 1: the critic is a baseline alone."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """Of rewards, per trained token."""
    normalization: Literal["batch", "none"] = "batch"
    """``batch``: advantages of the step's trained tokens get mean 0 and deviation 1."""


AdvantageConfig = (
    GrpoAdvantageConfig
    | DrGrpoAdvantageConfig
    | RlooAdvantageConfig
    | ReinforcePlusPlusAdvantageConfig
    | MaxRlAdvantageConfig
    | GaeAdvantageConfig
)
