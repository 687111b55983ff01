"""Training algorithms: a recipe by ``kind``, and the parts that it is made of.

A recipe fills in whatever the user leaves out, so that a resolved configuration shows every
coefficient that the trainer uses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl_cli.config.advantage import (
    AdvantageConfig,
    GaeAdvantageConfig,
    GrpoAdvantageConfig,
    ReinforcePlusPlusAdvantageConfig,
)
from agentrl_cli.config.base import StrictConfig
from agentrl_cli.config.loss import DecoupledPpoLossConfig, LossConfig

Aggregation = Literal["token_mean", "sequence_mean", "trajectory_mean", "constant"]

#: What each recipe takes where the user says nothing.
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": {"kind": "grpo"}, "loss": {"kind": "decoupled_ppo"}},
    "dr_grpo": {
        "advantage": {"kind": "dr_grpo"},
        "loss": {"kind": "decoupled_ppo"},
        "aggregation": "constant",
    },
    "rloo": {"advantage": {"kind": "rloo"}, "loss": {"kind": "reinforce"}},
    "reinforce_plus_plus": {
        "advantage": {"kind": "reinforce_plus_plus"},
        "loss": {"kind": "decoupled_ppo"},
    },
    "maxrl": {"advantage": {"kind": "maxrl"}, "loss": {"kind": "decoupled_ppo"}},
    "gspo": {
        "advantage": {"kind": "grpo"},
        "loss": {"kind": "gspo"},
        "aggregation": "trajectory_mean",
    },
    "cispo": {"advantage": {"kind": "grpo"}, "loss": {"kind": "cispo"}},
    "sapo": {
        "advantage": {"kind": "grpo"},
        "loss": {"kind": "sapo"},
        "aggregation": "trajectory_mean",
    },
    "ppo": {"advantage": {"kind": "gae"}, "loss": {"kind": "decoupled_ppo"}},
}


class RolloutCorrectionConfig(StrictConfig):
    """Weight of what older weights, or an engine with other numerics, sampled: the truncated
    exp(proximal - rollout) (arXiv 2110.00641; arXiv 2505.24298, section 5.2)."""

    level: Literal["token", "sequence"] = "token"
    """``sequence``: one weight per sample, the product of its tokens'."""
    mode: Literal["clamp", "mask"] = "clamp"
    """Beyond its bounds a weight is ``clamp``: moved to the bound; ``mask``: 0, so that its tokens
    give no gradient, but stay in the denominator."""
    cap: float = Field(2.0, ge=1.0)
    """Upper bound."""
    floor: float | None = Field(None, gt=0.0, le=1.0)
    """Lower bound; null: none."""


class KlConfig(StrictConfig):
    """A penalty on the divergence from the reference: the start weights, or with ``model.lora``
    the model without its adapter."""

    coef: float = Field(gt=0.0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of the divergence of a token (Schulman, "Approximating KL divergence"): with
    d = policy - ref, k1 = d, k2 = d² / 2, k3 = exp(-d) + d - 1. Left out: ``k3`` in the loss,
    where the gradient of k1 is 0 on average; ``k1`` in the reward, where it alone is unbiased."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: added to every token's loss; ``reward``: what a trajectory sampled is summed and
    taken off its reward, before advantages are computed."""

    @model_validator(mode="before")
    @classmethod
    def _choose_estimator(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("place") == "reward":
            return {"estimator": "k1", **data}
        return data


class OverlongConfig(StrictConfig):
    """A penalty on long trajectories that grows softly (DAPO, arXiv 2503.14476, equation 13): 0 up
    to max_tokens - buffer_tokens sampled tokens, ``coef`` from max_tokens on, linear between."""

    buffer_tokens: int = Field(ge=1)
    max_tokens: int | None = Field(None, ge=1)
    """null: rollout.max_tokens_per_trajectory."""
    coef: float = Field(1.0, gt=0.0)
    """Taken off the reward of a trajectory of max_tokens or more."""


class AlgorithmConfig(StrictConfig):
    """How trajectories become a gradient: a recipe, and what differs from it."""

    kind: Literal[
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_plus_plus",
        "maxrl",
        "gspo",
        "cispo",
        "sapo",
        "ppo",
    ] = "grpo"
    """The recipe; it gives every key below that is left out (docs/how-it-works.md)."""
    advantage: Annotated[AdvantageConfig, Field(discriminator="kind")] = GrpoAdvantageConfig()
    """How much better than expected an interaction was."""
    loss: Annotated[LossConfig, Field(discriminator="kind")] = DecoupledPpoLossConfig()
    """What is minimized for each trained token."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """null: no correction. Left out: token weights clamped at 2.0, but none with the loss
    ``ppo_clip``, whose ratio holds it already."""
    kl: KlConfig | None = None
    """null: no reference model."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Bonus for the entropy of each trained token's distribution, per nat."""
    overlong: OverlongConfig | None = None
    """null: length costs nothing."""
    aggregation: Aggregation = "token_mean"
    """How per-token losses of the whole minibatch become one number: every token alike, every
    sample alike, every trajectory alike, or a sum over trajectories x ``constant_denominator``."""
    constant_denominator: float | None = Field(None, gt=0.0)
    """Tokens, for ``constant``; null: gconfig.max_tokens."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_recipe(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        recipe = RECIPES.get(str(data.get("kind", "grpo")))
        if recipe is None:
            # The one mistake to report: without a recipe the parts have no kind.
            return {"kind": data["kind"]}
        filled = {**recipe, **data}
        for part in ("advantage", "loss"):
            given = data.get(part)
            if isinstance(given, dict):
                # Another kind's coefficients are none of this one's.
                filled[part] = given if "kind" in given else {**recipe[part], **given}
        if "rollout_correction" not in data and _find_kind(filled["loss"]) != "ppo_clip":
            filled["rollout_correction"] = {}
        return filled

    @property
    def uses_critic(self) -> bool:
        """True: advantages come from the values of a critic."""
        return isinstance(self.advantage, GaeAdvantageConfig)

    @property
    def compares_within_groups(self) -> bool:
        """True: a group of equal scores has no advantages, and teaches nothing."""
        advantage = self.advantage
        if isinstance(advantage, ReinforcePlusPlusAdvantageConfig):
            return advantage.baseline == "group"
        return not isinstance(advantage, GaeAdvantageConfig)

    @property
    def uses_reference(self) -> bool:
        """True: logprobs of a reference model are needed."""
        return self.kl is not None

    @property
    def has_kl_loss(self) -> bool:
        """True: every token's loss has a KL term."""
        return self.kl is not None and self.kl.place == "loss"

    @property
    def has_kl_reward(self) -> bool:
        """True: divergence from the reference is taken off the reward."""
        return self.kl is not None and self.kl.place == "reward"

    @property
    def trains_without_advantage(self) -> bool:
        """True: tokens of advantage 0 have a gradient too."""
        return self.has_kl_loss or self.entropy_coef > 0


def _find_kind(part: Any) -> Any:
    return part.get("kind") if isinstance(part, dict) else getattr(part, "kind", None)
