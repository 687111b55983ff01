"""Combinations of algorithm settings that are valid one by one and cannot work together."""

from __future__ import annotations

from agentrl_cli.config.algorithm import AlgorithmConfig
from agentrl_cli.errors import ConfigError
from agentrl_cli.log import get_logger

_log = get_logger(__name__)


def check_algorithm(
    algorithm: AlgorithmConfig, *, n_samples: int, max_tokens_per_trajectory: int
) -> None:
    """Refuses what would train nothing, or something else than it says.

    Raises:
        ConfigError: says what to type instead.
    """
    _check_groups(algorithm, n_samples)
    _check_correction(algorithm)
    _check_penalties(algorithm)
    _check_overlong(algorithm, max_tokens_per_trajectory)
    _check_aggregation(algorithm)
    if algorithm.has_kl_loss and algorithm.kl is not None and algorithm.kl.estimator == "k1":
        _log.warning(
            "train.algorithm.kl.estimator: k1 in the loss has a gradient of 0 on average, so that "
            "it holds on to the reference hardly at all. Type train.algorithm.kl.estimator=k3, "
            "or train.algorithm.kl.place=reward"
        )


def _check_groups(algorithm: AlgorithmConfig, n_samples: int) -> None:
    if n_samples > 1 or not algorithm.compares_within_groups:
        return
    raise ConfigError(
        "gconfig.n_samples: 1 with train.algorithm.advantage.kind "
        f"{algorithm.advantage.kind}: a group of one has advantage 0, so nothing would be learned. "
        "Allowed: 2 or more, or another advantage. Type gconfig.n_samples=8, or "
        "train.algorithm.kind=ppo, or train.algorithm.advantage.kind=reinforce_plus_plus "
        "train.algorithm.advantage.baseline=batch"
    )


def _check_correction(algorithm: AlgorithmConfig) -> None:
    if algorithm.loss.kind == "ppo_clip" and algorithm.rollout_correction is not None:
        raise ConfigError(
            "train.algorithm.rollout_correction with train.algorithm.loss.kind ppo_clip: its ratio "
            "is new / rollout, so what was sampled by other weights would be corrected for twice. "
            "Type train.algorithm.rollout_correction=null, or "
            "train.algorithm.loss.kind=decoupled_ppo"
        )


def _check_penalties(algorithm: AlgorithmConfig) -> None:
    if algorithm.advantage.kind != "maxrl":
        return
    for key, is_set, instead in (
        ("kl.place: reward", algorithm.has_kl_reward, "kl.place=loss"),
        ("overlong", algorithm.overlong is not None, "overlong=null"),
    ):
        if is_set:
            raise ConfigError(
                f"train.algorithm.{key} with train.algorithm.advantage.kind maxrl: a penalty makes "
                "rewards negative, and maxrl divides by their mean. Type "
                f"train.algorithm.{instead}, or train.algorithm.advantage.kind=grpo"
            )


def _check_overlong(algorithm: AlgorithmConfig, max_tokens_per_trajectory: int) -> None:
    overlong = algorithm.overlong
    if overlong is None:
        return
    limit = overlong.max_tokens or max_tokens_per_trajectory
    if overlong.buffer_tokens > limit:
        raise ConfigError(
            f"train.algorithm.overlong.buffer_tokens: {overlong.buffer_tokens} is more than the "
            f"{limit} tokens at which the penalty is whole, so that a trajectory of no token would "
            f"be punished. Allowed: up to {limit}. "
            f"Type train.algorithm.overlong.buffer_tokens={max(limit // 4, 1)}"
        )
    if limit > max_tokens_per_trajectory:
        raise ConfigError(
            f"train.algorithm.overlong.max_tokens: {limit} is more than "
            f"rollout.max_tokens_per_trajectory: {max_tokens_per_trajectory}, which no trajectory "
            "exceeds. Type train.algorithm.overlong.max_tokens=null, or "
            f"rollout.max_tokens_per_trajectory={limit}"
        )


def _check_aggregation(algorithm: AlgorithmConfig) -> None:
    if algorithm.constant_denominator is not None and algorithm.aggregation != "constant":
        raise ConfigError(
            f"train.algorithm.constant_denominator: {algorithm.constant_denominator:g} is not used "
            f"with train.algorithm.aggregation {algorithm.aggregation}. Type "
            "train.algorithm.aggregation=constant, or train.algorithm.constant_denominator=null"
        )
