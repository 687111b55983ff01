"""Minibatches: whole groups, each once, denominators over what is scored."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.train.data.minibatches import build_minibatches, compute_token_weights
from agentrl_cli.train.data.samples import (
    Sample,
    assign_advantages,
    build_samples,
    build_scoring_sample,
)


def build_config(seed: int = 1, **train: Any) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "experiment_name": "test",
            "seed": seed,
            "model": {"path": "none"},
            "workflow_path": "none.none",
            "gconfig": {"max_tokens": 10},
            "train_dataset": {"path": "none"},
            "train": train,
        }
    )


def build_trajectory(group: str, index: int, num_tokens: int, reward: float | None) -> Trajectory:
    turn = Interaction(
        id=f"{group}{index}",
        prompt_ids=(1,),
        completion_ids=(2,) * num_tokens,
        rollout_logprobs=(-1.0,) * num_tokens,
        versions=(0,) * num_tokens,
        turn_return=reward,
    )
    return Trajectory(
        id=turn.id, group_id=group, task_id=group, reward=reward,
        interactions=(turn,) if num_tokens else (),
    )  # fmt: skip


#: Interleaved groups; b1 is unscored, c1 made no call.
BATCH = [
    build_trajectory("a", 0, 1, 0.0),
    build_trajectory("b", 0, 2, 0.0),
    build_trajectory("a", 1, 3, 1.0),
    build_trajectory("b", 1, 50, None),
    build_trajectory("c", 0, 4, 0.0),
    build_trajectory("c", 1, 0, 1.0),
]
SAMPLES = assign_advantages(build_samples(BATCH, "concat"), {t.id: 1.0 for t in BATCH})


def test_whole_groups_each_once():
    minibatches = build_minibatches(BATCH, SAMPLES, build_config(num_minibatches=2), "1/0")
    groups = [{BATCH[s.trajectory_index].group_id for s in one.samples} for one in minibatches]
    assert sorted(len(g) for g in groups) == [1, 2]
    assert groups[0] | groups[1] == {"a", "b", "c"}
    assert not groups[0] & groups[1]
    assert sum(len(one.samples) for one in minibatches) == len(SAMPLES) == 4
    for one in minibatches:
        assert one.token_weights.keys() == {id(s) for s in one.samples}


def test_never_more_minibatches_than_groups():
    assert len(build_minibatches(BATCH, SAMPLES, build_config(num_minibatches=9), "")) == 3
    unscored = [t for t in BATCH if t.reward is None]
    assert build_minibatches(unscored, [], build_config(num_minibatches=2), "") == []


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # 1 + 2 + 3 + 4 + 0 = 10 trained tokens; the unscored 50 do not count.
        ({"aggregation": "token_mean"}, {0: 1 / 10, 1: 1 / 10, 2: 1 / 10, 4: 1 / 10}),
        # Four samples.
        ({"aggregation": "sequence_mean"}, {0: 1 / 4, 1: 1 / 8, 2: 1 / 12, 4: 1 / 16}),
        # Four scored trajectories: the one without a call has no score.
        ({"aggregation": "trajectory_mean"}, {0: 1 / 4, 1: 1 / 8, 2: 1 / 12, 4: 1 / 16}),
        # Four trajectories x gconfig.max_tokens, or x the given constant.
        ({"aggregation": "constant"}, dict.fromkeys((0, 1, 2, 4), 1 / 40)),
        (
            {"aggregation": "constant", "constant_denominator": 2.0},
            dict.fromkeys((0, 1, 2, 4), 1 / 8),
        ),
    ],
)
def test_denominators_by_hand(algorithm: dict[str, Any], expected: dict[int, float]):
    (one,) = build_minibatches(BATCH, SAMPLES, build_config(algorithm=algorithm), "")
    weights = {s.trajectory_index: one.token_weights[id(s)] for s in one.samples}
    assert weights == pytest.approx(expected)


def test_the_order_follows_seed_and_key():
    def orders(seed: int, keys: list[str]) -> list[tuple[str, ...]]:
        config = build_config(seed, num_minibatches=3)
        batches = [build_minibatches(BATCH, SAMPLES, config, key) for key in keys]
        return [tuple(one.samples[0].trajectory_id[0] for one in batch) for batch in batches]

    keys = [f"{step}/0" for step in range(20)]
    assert orders(1, keys) == orders(1, keys)
    assert orders(1, keys) != orders(2, keys)
    assert len(set(orders(1, keys))) > 1


def sample(trajectory_index: int, num_targets: int) -> Sample:
    built = build_scoring_sample([1] * (num_targets + 1), 1, temperature=1.0, top_p=1.0)
    return dataclasses.replace(built, trajectory_index=trajectory_index)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    # Trajectory 0 was cut into two samples of 1 and 4 tokens, 2 has one of 6, 1 has none.
    [("sequence_mean", [1 / 3, 1 / 18, 1 / 12]), ("trajectory_mean", [1 / 15, 1 / 18, 1 / 15])],
)
def test_weights_of_trajectories_in_several_samples(aggregation: Any, expected: list[float]):
    parts = [sample(0, 1), sample(2, 6), sample(0, 4)]
    weights = compute_token_weights(aggregation, parts, 3, 7.0)
    assert [weights[id(s)] for s in parts] == pytest.approx(expected)
