"""``train.critic``: there where advantages need it, and nowhere else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl_cli.config.critic import CriticConfig
from agentrl_cli.config.experiment import TrainConfig


def test_ppo_has_a_critic_with_defaults_and_keeps_what_is_given():
    assert TrainConfig.model_validate({"algorithm": {"kind": "ppo"}}).critic == CriticConfig()
    given = TrainConfig.model_validate(
        {"algorithm": {"kind": "ppo"}, "critic": {"learning_rate": 0.5, "clip_range": None}}
    )
    assert given.critic == CriticConfig(learning_rate=0.5, clip_range=None)


def test_any_recipe_has_one_once_its_advantage_is_gae():
    config = {"algorithm": {"kind": "gspo", "advantage": {"kind": "gae"}}}
    assert TrainConfig.model_validate(config).critic == CriticConfig()


def test_without_gae_there_is_none():
    assert TrainConfig().critic is None
    config = {"algorithm": {"kind": "ppo", "advantage": {"kind": "rloo"}}}
    assert TrainConfig.model_validate(config).critic is None


def test_a_critic_that_nothing_uses_is_refused():
    with pytest.raises(ValidationError, match=r"kind grpo need no critic.*train\.critic=null"):
        TrainConfig.model_validate({"critic": {"learning_rate": 0.5}})


def test_a_saved_configuration_is_read_again():
    config = TrainConfig.model_validate({"algorithm": {"kind": "ppo"}})
    assert TrainConfig.model_validate(config.model_dump(mode="json")) == config


def test_what_is_wrong_with_the_algorithm_is_said_alone():
    with pytest.raises(ValidationError) as caught:
        TrainConfig.model_validate({"algorithm": {"kind": "pppo"}, "critic": {}})
    assert [error["loc"] for error in caught.value.errors()] == [("algorithm", "kind")]


@pytest.mark.parametrize(
    "wrong", [{"learning_rate": 0.0}, {"warmup_steps": -1}, {"clip_range": 0.0}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValidationError):
        CriticConfig.model_validate(wrong)


def test_a_critic_does_not_learn_alone_until_the_end():
    config = {"total_steps": 3, "algorithm": {"kind": "ppo"}}
    assert TrainConfig.model_validate({**config, "critic": {"warmup_steps": 2}})
    with pytest.raises(ValidationError, match=r"alone until the end.*critic\.warmup_steps=2"):
        TrainConfig.model_validate({**config, "critic": {"warmup_steps": 3}})
