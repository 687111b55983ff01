"""What alarms say: the numbers that were seen, and commands and keys that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.alarms import AlarmsConfig
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.loading import load_config
from agentrl_cli.log import SilentObserver
from agentrl_cli.train.alarm_table import ALARMS
from agentrl_cli.train.alarms import Alarms

YAML = """
experiment_name: e
model: {path: m, dtype: bfloat16}
agent_builder_path: a.b
train_dataset: {path: d}
gconfig: {n_samples: 8, max_tokens: 64, temperature: 0.5}
train: {num_epochs: 4, num_minibatches: 2, algorithm: {kl: {coef: 0.05}}}
"""

HEALTHY = {
    "num_trajectories": 64.0,
    "num_unscored": 0.0,
    "num_groups": 8.0,
    "num_groups_without_signal": 2.0,
    "reward_mean": 0.5,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "truncated_fraction": 0.1,
    "train_tokens": 1000.0,
    "num_updates": 3.0,
    "entropy": 1.0,
    "logprob_gap_mean": 0.01,
    "probe_gap_mean": 1e-6,
    "off_policy_fraction": 0.5,
    "kl": 0.1,
    "approx_kl": 0.01,
    "clipfrac": 0.4,
    "completion_tokens_mean": 80.0,
    "broken_turns_fraction": 0.0,
}

#: What makes each alarm ring, and words that its message must hold.
CASES: list[tuple[str, dict[str, float], list[str]]] = [
    (
        "reward_constant",
        {"reward_mean": 0.0, "reward_max": 0.0, "num_groups_without_signal": 8.0},
        ["every reward of the last 5 steps (320 trajectories) was 0,", "does not recognize"],
    ),
    (
        "groups_equal",
        {"num_groups_without_signal": 8.0},
        ["8 of 8 groups", "at least 90%", "gconfig.n_samples=16", "mean reward 0.500"],
    ),
    (
        "logprob_gap",
        {"logprob_gap_mean": 0.25},
        ["0.25 nats", "first step it was 0.01", "rollout.max_staleness=1", "50% of the tokens"],
    ),
    (
        "logprob_gap",
        {"logprob_gap_mean": 0.25, "probe_gap_mean": 0.09},
        ["the engine computes otherwise", "0.09 nats apart after", "model.dtype=float32"],
    ),
    ("entropy_collapse", {"entropy": 0.02}, ["0.02 nats", "2.0% of the 1", "temperature=1.0"]),
    ("truncated", {"truncated_fraction": 0.8}, ["80%", "above 40%", "gconfig.max_tokens=128"]),
    ("kl_from_reference", {"kl": 3.0}, ["3 nats per token", "train.algorithm.kl.coef=0.1"]),
    ("kl_of_update", {"approx_kl": 0.3}, ["0.3 nats", "40% of the tokens", "train.num_epochs=2"]),
    (
        "broken_turns",
        {
            "broken_turns_fraction": 0.25,
            "breaks_thinking_stripped": 4.0,
            "breaks_retokenized": 1.0,
            "recomputed_tokens_thinking_stripped": 1000.0,
            "recomputed_tokens_retokenized": 234.0,
            "departed_tokens_thinking_stripped": 7.0,
        },
        ["5 turns, 25%", "1,234 prompt tokens", "7 sampled", "type engine.keep_thinking=true"],
    ),
    ("not_finite", {"num_skipped_updates": 2.0}, ["2 optimizer updates", "(3 were made)"]),
]


class Listener(SilentObserver):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(YAML)
    return path


def ring(config: ExperimentConfig, changes: dict[str, float], run_dir: Path) -> list[str]:
    listener = Listener()
    alarms = Alarms(config, run_dir, listener)
    for step in range(1, 16):
        alarms.check({"step": float(step)} | HEALTHY | (changes if step > 5 else {}))
        alarms.tell()
    return listener.messages


@pytest.mark.parametrize(("name", "changes", "words"), CASES, ids=lambda c: str(c)[:40])
def test_a_message_says_what_was_seen_and_what_to_type(
    config_path: Path, name: str, changes: dict[str, float], words: list[str]
) -> None:
    config = load_config(config_path)
    [text] = ring(config, changes, Path("my runs/e/t"))
    assert re.match(rf"step \d+: alarm {name}: ", text)
    for one in words:
        assert one in text, text
    assert "\n  usually: " in text
    assert "\n  try: " in text
    assert re.search(r"\n  look: agentrl inspect-trajectories 'my runs/e/t'", text)
    # What a person is told to type is taken.
    typed = re.findall(r"(?<![\w.])((?:train|gconfig|model|rollout|engine)\.[\w.]+=[\w.\-]+)", text)
    load_config(config_path, typed)
    assert typed or name == "reward_constant"


def test_more_of_a_bonus_is_advised_where_there_is_one(config_path: Path) -> None:
    config = load_config(config_path, ["train.algorithm.entropy_coef=0.01"])
    [text] = ring(config, {"entropy": 0.02}, Path("r"))
    assert "try: train.algorithm.entropy_coef=0.02\n" in text
    [text] = ring(load_config(config_path), {"entropy": 0.02}, Path("r"))
    assert "try: train.algorithm.entropy_coef=0.001\n" in text


def test_where_the_ratio_is_against_who_sampled_age_is_named(config_path: Path) -> None:
    """approx_kl is then that of the age of the tokens too, also in a step of one update."""
    stale = {"approx_kl": 0.3}
    [text] = ring(load_config(config_path), stale, Path("r"))
    assert "within one step the policy moves 0.3 nats" in text
    assert "older weights" not in text
    assert "max_staleness" not in text
    clipped = "train.algorithm.loss.kind=ppo_clip"
    config = load_config(config_path, [clipped, "train.num_epochs=1", "train.num_minibatches=1"])
    [text] = ring(config, stale, Path("r"))
    assert "from sampling on the policy moves 0.3 nats" in text
    assert "or tokens that older weights sampled" in text
    assert "try: rollout.max_staleness=1\n" in text


def test_every_alarm_has_a_case_and_a_rule() -> None:
    names = {alarm.name for alarm in ALARMS}
    assert names == {name for name, _, _ in CASES}
    assert names == set(AlarmsConfig.model_fields)
    assert {a.implied_by for a in ALARMS} <= names | {None}


def test_a_message_tells_only_of_what_is_there(config_path: Path) -> None:
    """Numbers that a step does not have are left out, not shown as 0 or nan."""
    config = load_config(config_path)
    changes: dict[str, Any] = {"reward_mean": float("nan"), "num_groups_without_signal": 8.0}
    [text] = ring(config, changes, Path("r"))
    assert "mean reward" not in text
    assert "nan" not in text
    changes = {"logprob_gap_mean": 0.5, "probe_gap_mean": float("nan")}
    [text] = ring(config, changes, Path("r"))
    assert "nan" not in text
    assert "nats apart after" not in text
