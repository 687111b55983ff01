"""``train.critic``: there where advantages need it, and nowhere else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from agentrl_cli.config.algorithm_config import CriticConfig
from agentrl_cli.config.train_config import TrainConfig


def test_ppo_has_a_critic_with_defaults_and_keeps_what_is_given():
    assert TrainConfig.model_validate({"algorithm": {"kind": "ppo"}}).critic == CriticConfig()
    given = TrainConfig.model_validate(
        {"algorithm": {"kind": "ppo"}, "critic": {"learning_rate": 0.5, "clip_range": None}}
    )
    assert given.critic == CriticConfig(learning_rate=0.5, clip_range=None)


def test_without_gae_there_is_none():
    assert TrainConfig().critic is None
    config = {"algorithm": {"kind": "ppo", "advantage": {"kind": "rloo"}}}
    assert TrainConfig.model_validate(config).critic is None


def test_a_critic_that_nothing_uses_is_refused():
    with pytest.raises(ValidationError, match=r"kind grpo need no critic.*train\.critic=null"):
        TrainConfig.model_validate({"critic": {"learning_rate": 0.5}})


def test_what_is_wrong_with_the_algorithm_is_said_alone():
    with pytest.raises(ValidationError) as caught:
        TrainConfig.model_validate({"algorithm": {"kind": "pppo"}, "critic": {}})
    assert [error["loc"] for error in caught.value.errors()] == [("algorithm", "kind")]


def test_a_critic_does_not_learn_alone_until_the_end():
    config = {"total_steps": 3, "algorithm": {"kind": "ppo"}}
    assert TrainConfig.model_validate({**config, "critic": {"warmup_steps": 2}})
    with pytest.raises(ValidationError, match=r"alone until the end.*critic\.warmup_steps=2"):
        TrainConfig.model_validate({**config, "critic": {"warmup_steps": 3}})
