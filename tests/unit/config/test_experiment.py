"""Configurations that can be evaluated, but not trained."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import ConfigError, MissingExtraError

PPO = {"algorithm": {"kind": "ppo"}}
FILTER = {"filter": {"kind": "dynamic_sampling"}}
ONE = {"n_samples": 1}


def build(**changes: Any) -> ExperimentConfig:
    data = {"experiment_name": "t", "model": {"path": "none"}, "workflow_path": "none.none"}
    return ExperimentConfig.model_validate({**data, "train_dataset": {"path": "none"}, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"weight_transfer": {"kind": "lora"}}}, "model.lora.*transfer.kind=disk"),
        (
            {"engine": {"kind": "sglang", "weight_transfer": {"kind": "nccl"}}},
            r"engine.kind sglang. Allowed: disk, lora",
        ),
        ({"gconfig": ONE}, "a group of one.*Type gconfig.n_samples=8"),
        ({"gconfig": {"temperature": 0.0}}, "no gradient.*Type gconfig.temperature=1.0"),
        (
            {"gconfig": ONE, "train": PPO, "rollout": FILTER},
            r"n_samples is 1\. .* Type gconfig\.n_samples=8, or rollout\.filter=null",
        ),
        (
            {"gconfig": ONE, "train": PPO, "rollout": {"curriculum": {"kind": "cooldown"}}},
            r"n_samples is 1\. .* or rollout\.curriculum=null",
        ),
        (
            {"train": PPO, "rollout": FILTER},
            r"kind gae learns from them as from others\. Type rollout\.filter=null",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    build().check_trainable()
    with pytest.raises(ConfigError, match=message):
        build(**changes).check_trainable()


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs peft (extra lora)")
@pytest.mark.parametrize("kind", [None, "disk", "nccl", "lora"])
def test_an_adapter_may_travel_in_any_way(kind):
    build(
        model={"path": "none", "lora": {}}, engine={"weight_transfer": {"kind": kind}}
    ).check_trainable()


def test_a_missing_peft_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match=r"agentrl-cli\[lora\]"):
        build(model={"path": "none", "lora": {}}).check_trainable()
