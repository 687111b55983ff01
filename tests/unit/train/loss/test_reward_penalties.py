"""Penalties by hand, and where they are taken off."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from agentrl_cli.config.algorithm_config import KlConfig, OverlongConfig
from agentrl_cli.errors import RunError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.tracking.credit import find_successors
from agentrl_cli.train.data.samples import Sample, build_scoring_sample
from agentrl_cli.train.loss.reward_penalties import (
    Penalties,
    compute_kl_penalties,
    compute_overlong_penalties,
    compute_overlong_penalty,
    reduce_rewards,
)


def sample(trajectory_index: int, rollout: list[float]) -> Sample:
    built = build_scoring_sample([1] * (len(rollout) + 1), 1, temperature=1.0, top_p=1.0)
    targets = dataclasses.replace(built.targets, rollout_logprobs=torch.tensor(rollout))
    return dataclasses.replace(
        built, targets=targets, trajectory_index=trajectory_index, trajectory_id="g/1"
    )


def trajectory(*turns: Interaction, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(id="g/0", group_id="g", task_id="g", reward=reward, interactions=turns)


def turn(name: str, **fields: object) -> Interaction:
    return dataclasses.replace(Interaction(id=name), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # Free up to 100 - 40 = 60; 75 is 15 of 40 into the buffer.
    [(0, 0.0), (60, 0.0), (61, 0.0125), (75, 0.1875), (100, 0.5), (5000, 0.5)],
)
def test_overlong_by_hand(num_tokens: int, penalty: float):
    config = OverlongConfig(buffer_tokens=40, coef=0.5)
    assert compute_overlong_penalty(num_tokens, config, 100) == pytest.approx(penalty)


def test_overlong_counts_the_tokens_of_all_calls():
    batch = [
        trajectory(turn("a", completion_ids=(1,) * 50), turn("b", completion_ids=(1,) * 40)),
        trajectory(turn("c", completion_ids=(1,) * 90), reward=None),
        trajectory(),
    ]
    config = OverlongConfig(buffer_tokens=40)
    assert compute_overlong_penalties(batch, config, 100) == pytest.approx({0: 0.75, 2: 0.0})
    own = OverlongConfig(buffer_tokens=40, max_tokens=90)
    assert compute_overlong_penalties(batch, own, 100) == pytest.approx({0: 1.0, 2: 0.0})


def test_kl_is_summed_over_the_samples_of_a_trajectory():
    # k1: (-1 + 1.5) + (-2 + 1) = -0.5 and -3 + 3.5 = 0.5 for trajectory 2; -1 + 4 = 3 for 0.
    samples = [sample(2, [-1.0, -2.0]), sample(0, [-1.0]), sample(2, [-3.0])]
    reference = {
        id(one): torch.tensor(logprobs)
        for one, logprobs in zip(samples, [[-1.5, -1.0], [-4.0], [-3.5]], strict=True)
    }
    config = KlConfig(coef=0.1, place="reward")
    assert compute_kl_penalties(samples, reference, config) == pytest.approx({2: 0.0, 0: 0.3})
    # k2: (0.25 + 1 + 0.25) / 2 = 0.75, and 9 / 2.
    squares = KlConfig(coef=2.0, place="reward", estimator="k2")
    assert compute_kl_penalties(samples, reference, squares) == pytest.approx({2: 1.5, 0: 9.0})


@pytest.mark.parametrize("logprob", [math.inf, -math.inf, math.nan])
def test_a_divergence_that_is_not_finite_is_named(logprob: float):
    one = sample(0, [-1.0])
    with pytest.raises(RunError) as caught:
        compute_kl_penalties(
            [one], {id(one): torch.tensor([logprob])}, KlConfig(coef=0.1, place="reward")
        )
    assert str(caught.value) == (
        f"trajectory g/1: its divergence from the reference model is {-1.0 - logprob} nats. "
        "The weights were not changed. Look at it with: agentrl inspect-trajectories RUN. "
        "model.dtype=float32 often helps"
    )


def test_penalties_add_up_and_their_means_are_over_all_trajectories():
    penalties = Penalties(4)
    penalties.add("overlong", {0: 1.0, 2: 0.5})
    penalties.add("kl", {0: 0.25, 1: 0.75})
    assert dict(penalties.amounts) == {0: 1.25, 1: 0.75, 2: 0.5}
    assert penalties.means == {"overlong_penalty_mean": 0.375, "kl_penalty_mean": 0.25}


def test_every_return_loses_the_penalty():
    # The last turn in time stands first; the failed call has no return and keeps nothing.
    turns = (
        turn("late", started=5, turn_return=3.0, reward=2.0),
        turn("early", started=1, turn_return=4.0, reward=1.0),
        turn("failed", started=9),
    )
    untouched = trajectory(turn("x", turn_return=1.0))
    reduced = reduce_rewards([untouched, trajectory(*turns, reward=3.0)], {0: 0.0, 1: 0.5})
    assert reduced[0] is untouched
    late, early, failed = reduced[1].interactions
    assert reduced[1].reward == 2.5
    assert (late.turn_return, early.turn_return, failed.turn_return) == (2.5, 3.5, None)
    assert (late.reward, early.reward, failed.reward) == (2.0, 1.0, None)
    # The score falls by the penalty: (3 + 4) / 2 - 0.5.
    assert compute_score(reduced[1]) == 3.0


def test_a_penalty_leaves_whose_credit_a_turn_shares_in():
    # Two parallel calls: the one that began last ends first, and hands over to the other.
    turns = (
        turn("long", started=1, ended=6, reward=1.0, turn_return=1.0),
        turn("short", started=2, ended=5, turn_return=1.0),
    )
    (reduced,) = reduce_rewards([trajectory(*turns)], {0: 0.25})
    assert find_successors(turns) == {"long": (), "short": ("long",)}
    assert find_successors(reduced.interactions) == find_successors(turns)


def test_without_calls_or_score():
    empty, unscored = trajectory(), trajectory(turn("a", turn_return=1.0), reward=None)
    reduced = reduce_rewards([empty, unscored], {0: 0.5, 1: 0.5})
    assert reduced[0].reward == 0.5
    assert reduced[1] is unscored


def test_divergence_that_is_taken_off_is_told_per_token_too():
    samples = [sample(0, [-1.0, -2.0]), sample(1, [-3.0])]
    reference = {id(samples[0]): torch.tensor([-2.0, -2.0]), id(samples[1]): torch.tensor([-8.0])}
    penalties = Penalties(4)
    penalties.add_kl(samples, reference, KlConfig(coef=0.5, place="reward"))
    # k1 is 1, 0 and 5: a half of it is taken off, over four trajectories and over three tokens.
    assert penalties.amounts == pytest.approx({0: 0.5, 1: 2.5})
    assert penalties.means == pytest.approx({"kl_penalty_mean": 0.75, "kl": 2.0})
    one = Penalties(1)
    one.add_kl(samples[1:], reference, KlConfig(coef=0.5, place="reward"))
    assert one.means["kl"] == 5.0
    none = Penalties(1)
    none.add_kl([], {}, KlConfig(coef=0.5, place="reward"))
    assert none.means["kl"] == 0.0
