"""Training algorithms: a recipe by ``kind``, and the parts that it is made of.

A recipe fills in whatever the user leaves out, so that a resolved configuration shows every
coefficient that the trainer uses.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from agentrl_cli.config.config_schema import StrictConfig
from agentrl_cli.errors import ConfigError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)


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
    """Weight of later rewards against the critic's values; 1: the critic is only a baseline."""
    discount: float = Field(1.0, gt=0.0, le=1.0)
    """Discount of rewards per trained token."""
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


class _PpoLossConfig(StrictConfig):
    kind: str
    clip_low: float = Field(0.2, gt=0.0, lt=1.0)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0.0)
    """The ratio is clipped above at 1 + clip_high (DAPO, arXiv 2503.14476, uses 0.28)."""
    dual_clip: float | None = Field(None, gt=1.0)
    """Bound of the loss for negative advantages (arXiv 1912.09729); null: off."""


class PpoClipLossConfig(_PpoLossConfig):
    """PPO's clipped objective with the ratio new / rollout (arXiv 1707.06347, equation 7)."""

    kind: Literal["ppo_clip"] = "ppo_clip"


class DecoupledPpoLossConfig(_PpoLossConfig):
    """PPO's clipped objective with the ratio new / proximal, so that stale tokens are not clipped
    for being stale (arXiv 2110.00641; arXiv 2505.24298, section 5.2)."""

    kind: Literal["decoupled_ppo"] = "decoupled_ppo"


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


class RolloutCorrectionConfig(StrictConfig):
    """Weight of what older weights sampled: the truncated exp(proximal - rollout) (arXiv
    2110.00641; arXiv 2505.24298, section 5.2). It is 1 for tokens of the newest policy version,
    unless ``on_policy_logprobs`` is ``rollout``."""

    level: Literal["token", "sequence"] = "token"
    """``sequence``: one weight per sample, the product of its tokens', so that older ones weigh on
    the newer ones that continue them."""
    mode: Literal["clamp", "mask"] = "clamp"
    """What happens to a weight outside its bounds. ``clamp``: it is moved to the bound; ``mask``:
    it becomes 0, so that its tokens give no gradient, but stay in the denominator (IcePop, arXiv
    2510.18855, with ``on_policy_logprobs: rollout``)."""
    cap: float = Field(2.0, ge=1.0)
    """Upper bound."""
    floor: float | None = Field(None, gt=0.0, le=1.0)
    """Lower bound; null: none."""


class KlConfig(StrictConfig):
    """A penalty on the divergence from the reference: the start weights, or with ``model.lora``
    the model without its adapter."""

    coef: float = Field(gt=0.0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of a token's divergence (Schulman, "Approximating KL divergence"): with
    d = policy - ref, k1 = d, k2 = d² / 2, k3 = exp(-d) + d - 1. Default: ``k3`` in the loss,
    where the gradient of k1 is 0 on average; ``k1`` in the reward, where it alone is unbiased."""
    place: Literal["loss", "reward"] = "loss"
    """``loss``: added to every token's loss; ``reward``: summed over what a trajectory sampled and
    subtracted from its reward, before advantages are computed."""

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
    """Subtracted from the reward of a trajectory of max_tokens or more."""


Aggregation = Literal["token_mean", "sequence_mean", "trajectory_mean", "constant"]


#: What each recipe takes where the user says nothing: advantage, loss and aggregation.
RECIPES: dict[str, tuple[str, str, Aggregation]] = {
    "grpo": ("grpo", "decoupled_ppo", "token_mean"),
    "dr_grpo": ("dr_grpo", "decoupled_ppo", "constant"),
    "rloo": ("rloo", "reinforce", "token_mean"),
    "reinforce_plus_plus": ("reinforce_plus_plus", "decoupled_ppo", "token_mean"),
    "maxrl": ("maxrl", "decoupled_ppo", "token_mean"),
    "gspo": ("grpo", "gspo", "trajectory_mean"),
    "cispo": ("grpo", "cispo", "token_mean"),
    "sapo": ("grpo", "sapo", "trajectory_mean"),
    "ppo": ("gae", "decoupled_ppo", "token_mean"),
}


class AlgorithmConfig(StrictConfig):
    """How trajectories become a gradient: a recipe, and what differs from it."""

    kind: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "maxrl", "gspo", "cispo", "sapo", "ppo"
    ] = "grpo"
    """The recipe; it gives every key below that is left out (docs/algorithms.md)."""
    advantage: Annotated[AdvantageConfig, Field(discriminator="kind")] = GrpoAdvantageConfig()
    """How much better than expected an interaction was."""
    loss: Annotated[LossConfig, Field(discriminator="kind")] = DecoupledPpoLossConfig()
    """What is minimized for each trained token."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """null: no correction. Default: token weights clamped at 2.0, but none with the loss
    ``ppo_clip``, whose ratio already contains it."""
    on_policy_logprobs: Literal["proximal", "rollout"] = "proximal"
    """Whose logprobs stand for those that a token of the newest policy version was sampled with, in
    ``rollout_correction`` and in the ratio of ``ppo_clip``. ``proximal``: the trainer's, of the
    same weights, so that weight and ratio begin at exactly 1, without the engine's rounding;
    ``rollout``: the engine's, as for older tokens, to correct for an engine that computes
    differently (quantized weights or cache)."""
    kl: KlConfig | None = None
    """null: no reference model."""
    entropy_coef: float = Field(0.0, ge=0.0)
    """Bonus for the entropy of each trained token's distribution, per nat."""
    overlong: OverlongConfig | None = None
    """null: no penalty on length."""
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
        advantage, loss, aggregation = recipe
        filled = {"advantage": {}, "loss": {}, "aggregation": aggregation, **data}
        for part, kind in (("advantage", advantage), ("loss", loss)):
            if isinstance(filled[part], dict):
                filled[part] = {"kind": kind, **filled[part]}
        chosen = filled["loss"]
        loss_kind = chosen["kind"] if isinstance(chosen, dict) else getattr(chosen, "kind", None)
        return filled if loss_kind == "ppo_clip" else {"rollout_correction": {}, **filled}

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
    def divides_by_deviation(self) -> bool:
        """True: advantages are divided by a deviation of the returns, or of themselves."""
        advantage = self.advantage
        if isinstance(advantage, GaeAdvantageConfig):
            return advantage.normalization == "batch"
        return isinstance(advantage, GrpoAdvantageConfig | ReinforcePlusPlusAdvantageConfig)

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
        """True: divergence from the reference is subtracted from the reward."""
        return self.kl is not None and self.kl.place == "reward"

    @property
    def trains_without_advantage(self) -> bool:
        """True: tokens of advantage 0 have a gradient too."""
        return self.has_kl_loss or self.entropy_coef > 0


class CriticConfig(StrictConfig):
    """A second model, which learns to predict returns. It is trained as ``train`` says (optimizer,
    schedule, minibatches, epochs), with a learning rate of its own. It takes the memory of a second
    policy; with ``model.lora`` it is an adapter of its own."""

    path: str | None = None
    """Hub id, folder or ``builtin:`` name of the model that it starts from, with the policy's
    tokenizer; null: ``model.path``. Its value head starts at 0."""
    learning_rate: float = Field(1.0e-5, gt=0.0)
    """Peak; warm-up and decay are those of ``train.learning_rate``."""
    warmup_steps: int = Field(0, ge=0)
    """First steps, in which the critic alone learns."""
    clip_range: float | None = Field(0.2, gt=0.0)
    """How far values may move in a step, in units of the reward; null: no limit."""


def check_algorithm(
    algorithm: AlgorithmConfig,
    *,
    n_samples: int,
    max_tokens_per_trajectory: int,
    max_staleness: int,
) -> None:
    """Refuses what would train nothing, or something else than it says.

    Raises:
        ConfigError: says what to type instead.
    """
    advantage, loss = algorithm.advantage.kind, algorithm.loss.kind
    if n_samples == 1 and algorithm.compares_within_groups:
        raise ConfigError(
            f"gconfig.n_samples: 1 with train.algorithm.advantage.kind {advantage}: a group of one "
            "has advantage 0, so nothing would be learned. Allowed: 2 or more, or another "
            "advantage. Type gconfig.n_samples=8, or train.algorithm.kind=ppo, or "
            "train.algorithm.advantage.kind=reinforce_plus_plus "
            "train.algorithm.advantage.baseline=batch"
        )
    if loss == "ppo_clip" and algorithm.rollout_correction is not None:
        raise ConfigError(
            "train.algorithm.rollout_correction with train.algorithm.loss.kind ppo_clip: its ratio "
            "is new / rollout, so what other weights sampled would be corrected for twice. "
            "Type train.algorithm.rollout_correction=null, or "
            "train.algorithm.loss.kind=decoupled_ppo"
        )
    if advantage == "maxrl" and (algorithm.has_kl_reward or algorithm.overlong is not None):
        key, instead = "overlong", "overlong=null"
        if algorithm.has_kl_reward:
            key, instead = "kl.place: reward", "kl.place=loss"
        raise ConfigError(
            f"train.algorithm.{key} with train.algorithm.advantage.kind maxrl: a penalty makes "
            "rewards negative, and maxrl divides by their mean. Type "
            f"train.algorithm.{instead}, or train.algorithm.advantage.kind=grpo"
        )
    _check_overlong(algorithm.overlong, max_tokens_per_trajectory)
    if algorithm.constant_denominator is not None and algorithm.aggregation != "constant":
        raise ConfigError(
            f"train.algorithm.constant_denominator: {algorithm.constant_denominator:g} is not used "
            f"with train.algorithm.aggregation {algorithm.aggregation}. Type "
            "train.algorithm.aggregation=constant, or train.algorithm.constant_denominator=null"
        )
    _warn_of_misfits(algorithm, max_staleness)


def _warn_of_misfits(algorithm: AlgorithmConfig, max_staleness: int) -> None:
    """Warns of settings that together do little, or something else than they seem to."""
    if algorithm.has_kl_loss and algorithm.kl is not None and algorithm.kl.estimator == "k1":
        _log.warning(
            "train.algorithm.kl.estimator: k1 in the loss has a gradient of 0 on average, so it "
            "hardly keeps the policy near the reference. Type train.algorithm.kl.estimator=k3, "
            "or train.algorithm.kl.place=reward"
        )
    is_chosen = algorithm.rollout_correction not in (None, RolloutCorrectionConfig())
    if is_chosen and max_staleness == 0 and algorithm.on_policy_logprobs == "proximal":
        _log.warning(
            "train.algorithm.rollout_correction with rollout.max_staleness: 0 corrects nothing: "
            "every token is of the newest policy version and has weight 1. Type "
            "train.algorithm.on_policy_logprobs=rollout to correct for the engine's numerics"
        )
    if algorithm.has_kl_reward and algorithm.divides_by_deviation:
        _log.warning(
            "train.algorithm.kl.place: reward with train.algorithm.advantage.kind %s: the penalty "
            "is divided by the deviation together with the reward, so where rewards are nearly "
            "equal it is most of the advantage, whatever kl.coef is. Type "
            "train.algorithm.kl.place=loss, or %s",
            algorithm.advantage.kind,
            "train.algorithm.advantage.normalization=none"
            if algorithm.uses_critic
            else "train.algorithm.advantage.kind=dr_grpo",
        )


def _check_overlong(overlong: OverlongConfig | None, max_tokens_per_trajectory: int) -> None:
    if overlong is None:
        return
    limit = overlong.max_tokens or max_tokens_per_trajectory
    if overlong.buffer_tokens > limit:
        raise ConfigError(
            f"train.algorithm.overlong.buffer_tokens: {overlong.buffer_tokens} is more than the "
            f"{limit} tokens at which the penalty is complete, so an empty trajectory would be "
            f"punished. Allowed: up to {limit}. "
            f"Type train.algorithm.overlong.buffer_tokens={max(limit // 4, 1)}"
        )
    if limit > max_tokens_per_trajectory:
        raise ConfigError(
            f"train.algorithm.overlong.max_tokens: {limit} is more than "
            f"rollout.max_tokens_per_trajectory: {max_tokens_per_trajectory}, which no trajectory "
            "exceeds. Type train.algorithm.overlong.max_tokens=null, or "
            f"rollout.max_tokens_per_trajectory={limit}"
        )
