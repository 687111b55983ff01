"""Recipes fill in what is left out; combinations that cannot work are refused with a way out."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl_cli.config.algorithm_config import (
    RECIPES,
    AlgorithmConfig,
    CriticConfig,
    check_algorithm,
)
from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import ConfigError


def build(**given: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(given)


@pytest.mark.parametrize(
    ("kind", "advantage", "loss", "aggregation"),
    [
        ("grpo", "grpo", "decoupled_ppo", "token_mean"),
        ("dr_grpo", "dr_grpo", "decoupled_ppo", "constant"),
        ("rloo", "rloo", "reinforce", "token_mean"),
        ("reinforce_plus_plus", "reinforce_plus_plus", "decoupled_ppo", "token_mean"),
        ("maxrl", "maxrl", "decoupled_ppo", "token_mean"),
        ("gspo", "grpo", "gspo", "trajectory_mean"),
        ("cispo", "grpo", "cispo", "token_mean"),
        ("sapo", "grpo", "sapo", "trajectory_mean"),
        ("ppo", "gae", "decoupled_ppo", "token_mean"),
    ],
)
def test_recipes(kind: str, advantage: str, loss: str, aggregation: str):
    recipe = build(kind=kind)
    assert (recipe.advantage.kind, recipe.loss.kind) == (advantage, loss)
    assert recipe.aggregation == aggregation
    assert recipe.rollout_correction is not None
    assert recipe.rollout_correction.model_dump() == {
        "level": "token",
        "mode": "clamp",
        "cap": 2.0,
        "floor": None,
    }
    assert (recipe.kl, recipe.overlong, recipe.entropy_coef) == (None, None, 0.0)
    assert recipe.uses_critic is (kind == "ppo")
    assert AlgorithmConfig() == build() == build(kind="grpo")
    check(recipe)
    check(build(kind=kind, entropy_coef=0.01, kl={"coef": 0.1}))


def test_a_coefficient_keeps_the_recipes_kind():
    mixed = build(kind="gspo", loss={"clip_high": 0.1}, aggregation="token_mean")
    assert mixed.loss.model_dump() == {"kind": "gspo", "clip_low": 3e-4, "clip_high": 0.1}
    assert mixed.aggregation == "token_mean"
    assert build(kind="ppo", advantage={"gae_lambda": 0.5}).advantage.kind == "gae"
    # Another kind takes its own coefficients.
    mixed = build(kind="gspo", loss={"kind": "decoupled_ppo"})
    assert mixed.loss.model_dump()["clip_low"] == 0.2


def test_the_correction_is_left_out_with_ppo_clip_alone():
    assert build(loss={"kind": "ppo_clip"}).rollout_correction is None
    assert build(rollout_correction=None).rollout_correction is None
    kept = build(rollout_correction={"mode": "mask"}).rollout_correction
    assert kept is not None
    assert (kept.mode, kept.cap) == ("mask", 2.0)


@pytest.mark.parametrize("kind", sorted(RECIPES))
def test_a_resolved_algorithm_resolves_to_itself(kind: str):
    resolved = build(kind=kind, kl={"coef": 0.1, "place": "reward"}).model_dump(mode="json")
    assert build(**resolved).model_dump(mode="json") == resolved


def test_what_is_needed_follows_from_the_terms():
    in_loss, in_reward = build(kl={"coef": 0.1}), build(kl={"coef": 0.1, "place": "reward"})
    assert in_loss.kl is not None
    assert in_reward.kl is not None
    assert (in_loss.kl.estimator, in_reward.kl.estimator) == ("k3", "k1")
    plain, entropy = build(), build(entropy_coef=0.01)
    assert [a.uses_reference for a in (in_loss, in_reward, plain)] == [True, True, False]
    assert [a.has_kl_loss for a in (in_loss, in_reward, plain)] == [True, False, False]
    assert [a.has_kl_reward for a in (in_loss, in_reward, plain)] == [False, True, False]
    assert [a.trains_without_advantage for a in (in_loss, in_reward, plain, entropy)] == [
        True, False, False, True,
    ]  # fmt: skip
    compares = [build(kind=kind).compares_within_groups for kind in ("grpo", "rloo", "ppo")]
    assert compares == [True, True, False]
    whole = {"kind": "reinforce_plus_plus", "baseline": "batch"}
    assert not build(advantage=whole).compares_within_groups


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "grop"},
        {"kind": "grop", "loss": {"clip_high": 0.1}},
        {"loss": {"kind": "sapo", "clip_high": 0.1}},
        {"loss": "cispo"},
        {"kl": {"coef": 0.0}},
        {"kl_coef": 0.1},
    ],
)
def test_what_is_wrong_by_itself_is_one_problem(given: dict[str, Any]):
    with pytest.raises(ValidationError) as caught:
        build(**given)
    assert len(caught.value.errors()) == 1


def check(algorithm: AlgorithmConfig, n_samples: int = 4, staleness: int = 2) -> None:
    check_algorithm(
        algorithm,
        n_samples=n_samples,
        max_tokens_per_trajectory=1000,
        max_staleness=staleness,
    )


@pytest.mark.parametrize("kind", sorted(set(RECIPES) - {"ppo"}))
def test_a_group_of_one_is_refused(kind: str):
    with pytest.raises(ConfigError, match=r"n_samples: 1 .* Type gconfig\.n_samples=8") as caught:
        check(build(kind=kind), n_samples=1)
    assert build(kind=kind).advantage.kind in str(caught.value)
    check(build(kind="ppo"), n_samples=1)
    check(build(advantage={"kind": "reinforce_plus_plus", "baseline": "batch"}), n_samples=1)


@pytest.mark.parametrize(
    ("given", "message", "cures"),
    [
        (
            {"loss": {"kind": "ppo_clip"}, "rollout_correction": {}},
            r"corrected for twice.*rollout_correction=null.*loss\.kind=decoupled_ppo",
            [{"rollout_correction": None}, {"loss": {"kind": "decoupled_ppo"}}],
        ),
        (
            {"kind": "maxrl", "kl": {"coef": 0.1, "place": "reward"}},
            r"kl\.place: reward with .*maxrl.*kl\.place=loss",
            [{"kl": {"coef": 0.1, "place": "loss"}}, {"advantage": {"kind": "grpo"}}],
        ),
        (
            {"kind": "maxrl", "overlong": {"buffer_tokens": 10}},
            r"overlong with .*maxrl.*overlong=null",
            [{"overlong": None}],
        ),
        (
            {"overlong": {"buffer_tokens": 1001}},
            r"buffer_tokens: 1001 .*up to 1000.*buffer_tokens=250",
            [{"overlong": {"buffer_tokens": 250}}, {"overlong": {"buffer_tokens": 1000}}],
        ),
        (
            {"overlong": {"buffer_tokens": 11, "max_tokens": 10}},
            r"buffer_tokens: 11 .*up to 10\..*buffer_tokens=2",
            [{"overlong": {"buffer_tokens": 2, "max_tokens": 10}}],
        ),
        (
            {"overlong": {"buffer_tokens": 1, "max_tokens": 1001}},
            r"max_tokens: 1001 .*trajectory: 1000.*max_tokens=null.*trajectory=1001",
            [{"overlong": {"buffer_tokens": 1, "max_tokens": 1000}}],
        ),
        (
            {"constant_denominator": 5.0},
            r"constant_denominator: 5 .*aggregation=constant",
            [{"aggregation": "constant"}, {"constant_denominator": None}],
        ),
    ],
)
def test_what_cannot_work_together_is_refused(
    given: dict[str, Any], message: str, cures: list[dict[str, Any]]
):
    with pytest.raises(ConfigError, match=message):
        check(build(**given))
    for cure in cures:
        check(build(**{**given, **cure}))


def test_a_correction_of_tokens_that_have_weight_1_is_warned_of(caplog: pytest.LogCaptureFixture):
    masked = {"rollout_correction": {"mode": "mask"}}
    with caplog.at_level(logging.WARNING):
        check(build(), staleness=0)
        check(build(**masked), staleness=1)
        check(build(**masked, on_policy_logprobs="rollout"), staleness=0)
        assert not caplog.records
        check(build(**masked), staleness=0)
    assert "Type train.algorithm.on_policy_logprobs=rollout" in caplog.text


def test_k1_in_the_loss_is_warned_of(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check(build(kl={"coef": 0.1}))
        check(build(kl={"coef": 0.1, "place": "reward"}, advantage={"kind": "dr_grpo"}))
        assert not caplog.records
        check(build(kl={"coef": 0.1, "estimator": "k1"}))
    assert "kl.estimator=k3" in caplog.text


@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        ("grpo", {"advantage": {"kind": "dr_grpo"}}),
        ("ppo", {"advantage": {"kind": "gae", "normalization": "none"}}),
    ],
)
def test_a_penalty_that_is_divided_with_the_reward_is_warned_of(
    kind: str, cure: dict[str, Any], caplog: pytest.LogCaptureFixture
):
    in_reward = {"kind": kind, "kl": {"coef": 0.1, "place": "reward"}}
    with caplog.at_level(logging.WARNING):
        check(build(**in_reward | cure))
        check(build(kind=kind, kl={"coef": 0.1}))
        assert not caplog.records
        check(build(**in_reward))
    assert "the penalty is divided by the deviation" in caplog.text
    [(name, value)] = list(cure["advantage"].items())[-1:]
    assert f"advantage.{name}={value}" in caplog.text


def train(**given: Any) -> TrainConfig:
    return TrainConfig.model_validate(given)


def test_a_critic_is_there_where_advantages_need_it_and_nowhere_else():
    ppo = {"kind": "ppo"}
    assert train(algorithm=ppo).critic == CriticConfig()
    given = train(algorithm=ppo, critic={"learning_rate": 0.5, "clip_range": None})
    assert given.critic == CriticConfig(learning_rate=0.5, clip_range=None)
    assert train().critic is None
    assert train(algorithm=ppo | {"advantage": {"kind": "rloo"}}).critic is None
    with pytest.raises(ValidationError, match=r"kind grpo need no critic.*train\.critic=null"):
        train(critic={"learning_rate": 0.5})
    assert train(total_steps=3, algorithm=ppo, critic={"warmup_steps": 2})
    with pytest.raises(ValidationError, match=r"alone until the end.*critic\.warmup_steps=2"):
        train(total_steps=3, algorithm=ppo, critic={"warmup_steps": 3})
    # What is wrong with the algorithm is said alone.
    with pytest.raises(ValidationError) as caught:
        train(algorithm={"kind": "pppo"}, critic={})
    assert [error["loc"] for error in caught.value.errors()] == [("algorithm", "kind")]


@pytest.mark.parametrize(
    ("advantage", "place", "advice"),
    [
        ({"kind": "grpo"}, "reward", "kind=dr_grpo"),
        ({"kind": "reinforce_plus_plus"}, "reward", "kind=dr_grpo"),
        ({"kind": "gae"}, "reward", "normalization=none"),
        ({"kind": "gae", "normalization": "none"}, "reward", None),
        ({"kind": "dr_grpo"}, "reward", None),
        ({"kind": "grpo"}, "loss", None),
    ],
)
def test_a_divided_penalty_is_warned_of(
    caplog: pytest.LogCaptureFixture, advantage: Any, place: str, advice: str | None
):
    with caplog.at_level(logging.WARNING):
        check(build(kl={"coef": 0.1, "place": place}, advantage=advantage))
    assert (advice or "") in caplog.text
    assert ("divided by the deviation" in caplog.text) == (advice is not None)
