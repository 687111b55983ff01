"""Advantages, and the penalties that are taken off rewards, against numbers worked by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from agentrl_cli.config.algorithm_config import (
    AdvantageConfig,
    DrGrpoAdvantageConfig,
    GaeAdvantageConfig,
    GrpoAdvantageConfig,
    KlConfig,
    MaxRlAdvantageConfig,
    OverlongConfig,
    ReinforcePlusPlusAdvantageConfig,
    RlooAdvantageConfig,
)
from agentrl_cli.errors import RunError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.scores import compute_group_statistics, compute_score
from agentrl_cli.tracking.credit import find_successors
from agentrl_cli.train.data.samples import Sample, build_scoring_sample
from agentrl_cli.train.loss.advantages import Penalties, compute_advantages

GRPO = GrpoAdvantageConfig()
DR_GRPO = DrGrpoAdvantageConfig()
RLOO = RlooAdvantageConfig()
MAXRL = MaxRlAdvantageConfig()
GROUP_BASELINE = ReinforcePlusPlusAdvantageConfig()
BATCH_BASELINE = ReinforcePlusPlusAdvantageConfig(baseline="batch")
COMPARING = [GRPO, DR_GRPO, RLOO, MAXRL, GROUP_BASELINE, BATCH_BASELINE]


def kind_of(config: AdvantageConfig) -> str:
    return f"{config.kind}-{getattr(config, 'baseline', '')}".strip("-")


def trajectory(
    name: str, returns: list[float | None], reward: float | None = 0.0, group: str = "g"
) -> Trajectory:
    return Trajectory(
        id=name,
        group_id=group,
        task_id=group,
        reward=reward,
        interactions=tuple(
            Interaction(id=f"{name}{turn}", turn_return=value) for turn, value in enumerate(returns)
        ),
    )


def test_turns_without_a_return_are_left_out_of_the_score():
    # The failed call in the middle counts neither as 0 nor as a turn: the score stays 1.
    assert compute_score(trajectory("a", [1.0, None, 1.0])) == 1.0
    advantages = compute_advantages([trajectory("a", [1.0, None]), trajectory("b", [0.0])], GRPO)
    assert advantages["a1"] == 0.0
    assert advantages["a0"] > 0.7


@pytest.mark.parametrize("config", COMPARING, ids=kind_of)
@pytest.mark.parametrize("missing", [None, math.nan, math.inf, -math.inf])
def test_an_unscored_trajectory_is_out_of_mean_and_deviation(
    missing: float | None, config: AdvantageConfig
):
    batch = [
        trajectory("a", [0.0]),
        trajectory("b", [1.0]),
        trajectory("c", [1000.0], reward=missing),
    ]
    with_it, without = (compute_advantages(part, config) for part in (batch, batch[:2]))
    assert with_it == without | {"c0": 0.0}
    assert compute_group_statistics(batch)["g"].num_scored == 2


def test_a_return_that_is_not_finite_unscores_its_trajectory_alone():
    batch = [trajectory("a", [0.0]), trajectory("b", [1.0]), trajectory("c", [math.nan])]
    advantages = compute_advantages(batch, GRPO)
    assert advantages["c0"] == 0.0
    assert advantages["b0"] == pytest.approx(0.70711, abs=1e-5)


@pytest.mark.parametrize("config", COMPARING, ids=kind_of)
@pytest.mark.parametrize(
    "scores",
    [
        [0.7],
        [1.0, 1.0, 1.0],
        [0.0, 0.0],
        # The same sum in two orders: 0.6000000000000001 and 0.6.
        [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1],
        [1e12 / 3.0, 1e12 / 3.0 * (1 + 2e-16)],
    ],
)
def test_one_or_equal_scores_have_advantage_exactly_zero(
    scores: list[float], config: AdvantageConfig
):
    batch = [trajectory(f"t{index}", [score]) for index, score in enumerate(scores)]
    assert set(compute_advantages(batch, config).values()) == {0.0}
    assert not compute_group_statistics(batch)["g"].has_signal


#: Group x: scores (3 + 1) / 2 = 2, 0 and 1, mean 1, deviation sqrt((1 + 1 + 0) / 2) = 1.
#: Group y: 4 and 0, mean 2, deviation sqrt((4 + 4) / 1) = 2.82843. Group z: equal.
BATCH = [
    trajectory("a", [3.0, 1.0], group="x"),
    trajectory("d", [4.0], group="y"),
    trajectory("b", [0.0], group="x"),
    trajectory("e", [0.0], group="y"),
    trajectory("c", [1.0], group="x"),
    trajectory("f", [2.5], group="z"),
    trajectory("g", [2.5], group="z"),
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Over the group's deviation: 1 and 2.82843.
        (GRPO, {"a0": 2, "a1": 0, "b0": -1, "c0": 0, "d0": 0.707107, "e0": -0.707107}),
        (DR_GRPO, {"a0": 2, "a1": 0, "b0": -1, "c0": 0, "d0": 2, "e0": -2}),
        # Means of the others: a (0 + 1) / 2, b (2 + 1) / 2, c (2 + 0) / 2, d 0, e 4.
        (RLOO, {"a0": 2.5, "a1": 0.5, "b0": -1.5, "c0": 0, "d0": 4, "e0": -4}),
        # Over the group's mean: 1 and 2.
        (MAXRL, {"a0": 2, "a1": 0, "b0": -1, "c0": 0, "d0": 1, "e0": -1}),
        # Scores less their group means: 1, -1, 0, 2, -2, 0, 0: sqrt(10 / 6) = 1.290994.
        (
            GROUP_BASELINE,
            {"a0": 1.549193, "a1": 0, "b0": -0.774597, "c0": 0, "d0": 1.549193, "e0": -1.549193},
        ),
    ],
    ids=["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus"],
)
def test_every_kind_by_hand(config: AdvantageConfig, expected: dict[str, float]):
    advantages = compute_advantages(BATCH, config)
    assert advantages.pop("f0") == advantages.pop("g0") == 0.0
    assert advantages == pytest.approx(expected, abs=4e-6)


def test_the_batch_as_one_group_by_hand():
    # Scores 2, 4, 0, 0, 1, 2.5, 2.5: mean 12 / 7, squares 4 + 16 + 0 + 0 + 1 + 6.25 + 6.25 =
    # 33.5, deviation sqrt((33.5 - 144 / 7) / 6) = 1.468397.
    advantages = compute_advantages(BATCH, BATCH_BASELINE)
    deviation = math.sqrt((33.5 - 144 / 7) / 6)
    returns = {"a0": 3, "a1": 1, "b0": 0, "c0": 1, "d0": 4, "e0": 0, "f0": 2.5, "g0": 2.5}
    expected = {name: (value - 12 / 7) / (deviation + 1e-6) for name, value in returns.items()}
    assert advantages == pytest.approx(expected, rel=1e-12)


def test_the_batch_as_one_group_needs_no_groups():
    batch = [trajectory("a", [0.0], group="x"), trajectory("b", [1.0], group="y")]
    assert set(compute_advantages(batch, GROUP_BASELINE).values()) == {0.0}
    assert compute_advantages(batch, BATCH_BASELINE)["b0"] == pytest.approx(0.70711, abs=1e-5)


@pytest.mark.parametrize("config", [GRPO, GROUP_BASELINE, BATCH_BASELINE], ids=kind_of)
def test_epsilon_is_added_to_the_deviation(config: AdvantageConfig):
    # Deviation sqrt(2) x 1e-6: (1e-6) / (1.41421e-6 + 1e-6).
    batch = [trajectory("a", [0.0]), trajectory("b", [2e-6])]
    expected = 1.0 / (math.sqrt(2.0) + 1.0)
    assert compute_advantages(batch, config)["b0"] == pytest.approx(expected, rel=1e-9)


def test_maxrl_follows_the_logarithm_of_the_success_probability():
    # Two successes of eight, as 1 / successes for each less 1 / group for all.
    batch = [trajectory(f"t{i}", [1.0 if i < 2 else 0.0]) for i in range(8)]
    advantages = compute_advantages(batch, MAXRL)
    assert advantages["t00"] / 8 == pytest.approx(1 / 2 - 1 / 8)
    assert advantages["t70"] / 8 == pytest.approx(-1 / 8)


def test_maxrl_refuses_scores_below_zero():
    batch = [trajectory("a", [-0.5]), trajectory("b", [1.0])]
    with pytest.raises(RunError) as caught:
        compute_advantages(batch, MAXRL)
    assert str(caught.value) == (
        "trajectory a has the score -0.5: train.algorithm.advantage.kind maxrl divides by the mean "
        "score of a group. Allowed: rewards of 0 and above. "
        "Type train.algorithm.advantage.kind=grpo, or change the reward function"
    )
    compute_advantages([trajectory("a", [-0.5], reward=None), *batch[1:]], MAXRL)


def test_gae_is_not_of_interactions():
    message = "^advantages of kind gae are of tokens, from a critic's values$"
    with pytest.raises(ValueError, match=message):
        compute_advantages(BATCH, GaeAdvantageConfig())


@pytest.mark.parametrize("config", COMPARING, ids=kind_of)
def test_the_order_of_trajectories_is_of_no_meaning(config: AdvantageConfig):
    assert compute_advantages(BATCH[::-1], config) == pytest.approx(
        compute_advantages(BATCH, config), rel=1e-12
    )


@pytest.mark.parametrize("config", COMPARING, ids=kind_of)
def test_nothing_scored_is_nothing_learned(config: AdvantageConfig):
    assert compute_advantages([], config) == {}
    batch = [trajectory("a", [1.0], reward=None), trajectory("b", [0.0], reward=None)]
    assert compute_advantages(batch, config) == {"a0": 0.0, "b0": 0.0}


def sample(trajectory_index: int, rollout: list[float]) -> Sample:
    built = build_scoring_sample([1] * (len(rollout) + 1), 1, temperature=1.0, top_p=1.0)
    targets = dataclasses.replace(built.targets, rollout_logprobs=torch.tensor(rollout))
    return dataclasses.replace(
        built, targets=targets, trajectory_index=trajectory_index, trajectory_id="g/1"
    )


def attempt(*turns: Interaction, reward: float | None = 1.0) -> Trajectory:
    return Trajectory(id="g/0", group_id="g", task_id="g", reward=reward, interactions=turns)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    # Free up to 100 - 40 = 60; 75 is 15 of 40 into the buffer.
    [(0, 0.0), (60, 0.0), (61, 0.0125), (75, 0.1875), (100, 0.5), (5000, 0.5)],
)
def test_overlong_by_hand(num_tokens: int, penalty: float):
    penalties = Penalties([attempt(Interaction(id="a", completion_ids=(1,) * num_tokens))])
    penalties.add_overlong(OverlongConfig(buffer_tokens=40, coef=0.5), 100)
    assert penalties.amounts == pytest.approx({0: penalty})


@pytest.mark.parametrize(("own_limit", "penalty"), [(None, 0.75), (90, 1.0)])
def test_overlong_counts_the_tokens_of_all_calls(own_limit: int | None, penalty: float):
    a, b, c = (Interaction(id=str(count), completion_ids=(1,) * count) for count in (50, 40, 90))
    penalties = Penalties([attempt(a, b), attempt(c, reward=None), attempt()])
    penalties.add_overlong(OverlongConfig(buffer_tokens=40, max_tokens=own_limit), 100)
    assert penalties.amounts == pytest.approx({0: penalty})
    assert penalties.means == {"overlong_penalty_mean": pytest.approx(penalty / 3)}


@pytest.mark.parametrize(
    ("config", "amounts", "kl"),
    [
        # k1: (-1 + 1.5) + (-2 + 1) = -0.5 and -3 + 3.5 = 0.5 for trajectory 2; -1 + 4 = 3 for 0;
        # 3 over four tokens.
        ({"coef": 0.1}, {2: 0.0, 0: 0.3}, 0.75),
        # k2: (0.25 + 1 + 0.25) / 2 = 0.75, and 9 / 2.
        ({"coef": 2.0, "estimator": "k2"}, {2: 1.5, 0: 9.0}, 5.25 / 4),
    ],
)
def test_kl_is_summed_over_the_samples_of_a_trajectory(
    config: dict[str, Any], amounts: dict[int, float], kl: float
):
    samples = [sample(2, [-1.0, -2.0]), sample(0, [-1.0]), sample(2, [-3.0])]
    reference = {
        id(one): torch.tensor(logprobs)
        for one, logprobs in zip(samples, [[-1.5, -1.0], [-4.0], [-3.5]], strict=True)
    }
    penalties = Penalties([attempt()] * 5)
    penalties.add_kl(samples, reference, KlConfig(place="reward", **config))
    assert penalties.amounts == pytest.approx(amounts)
    mean = sum(amounts.values()) / 5
    assert penalties.means == pytest.approx({"kl_penalty_mean": mean, "kl": kl})
    none = Penalties([attempt()])
    none.add_kl([], {}, KlConfig(place="reward", **config))
    assert none.means["kl"] == 0.0


@pytest.mark.parametrize("logprob", [math.inf, -math.inf, math.nan])
def test_a_divergence_that_is_not_finite_is_named(logprob: float):
    one = sample(0, [-1.0])
    reference = {id(one): torch.tensor([logprob])}
    with pytest.raises(RunError, match=r"^trajectory g/1: its divergence .* model\.dtype=float32 "):
        Penalties([attempt()]).add_kl([one], reference, KlConfig(coef=0.1, place="reward"))


def test_every_return_loses_all_penalties():
    # The last turn in time stands first; the failed call has no return and keeps nothing.
    turns = (
        Interaction(id="late", started=5, turn_return=3.0, reward=2.0, completion_ids=(1,) * 90),
        Interaction(id="early", started=1, turn_return=4.0, reward=1.0),
        Interaction(id="failed", started=9),
    )
    untouched = attempt(Interaction(id="x", turn_return=1.0))
    penalties = Penalties([untouched, attempt(*turns, reward=3.0), attempt(reward=None), attempt()])
    # 30 / 40 x 0.5 and 0.5 x (-2.25 + 2.5).
    penalties.add_overlong(OverlongConfig(buffer_tokens=40, coef=0.5), 100)
    one = sample(1, [-2.25])
    reference = {id(one): torch.tensor([-2.5])}
    penalties.add_kl([one], reference, KlConfig(coef=0.5, place="reward"))
    penalties.amounts[2] = penalties.amounts[3] = 0.25
    reduced = penalties.reduce_rewards()
    assert reduced[0] is untouched
    late, early, failed = reduced[1].interactions
    assert reduced[1].reward == 2.5
    assert (late.turn_return, early.turn_return, failed.turn_return) == (2.5, 3.5, None)
    assert (late.reward, early.reward, failed.reward) == (2.0, 1.0, None)
    # The score falls by the penalty: (3 + 4) / 2 - 0.5.
    assert compute_score(reduced[1]) == 3.0
    assert [t.reward for t in reduced[2:]] == [None, 0.75]


def test_a_penalty_leaves_whose_credit_a_turn_shares_in():
    # Two parallel calls: the one that began last ends first, and hands over to the other.
    turns = (
        Interaction(id="long", started=1, ended=6, reward=1.0, turn_return=1.0),
        Interaction(id="short", started=2, ended=5, turn_return=1.0),
    )
    penalties = Penalties([attempt(*turns)])
    penalties.amounts[0] = 0.25
    (reduced,) = penalties.reduce_rewards()
    assert find_successors(turns) == {"long": (), "short": ("long",)}
    assert find_successors(reduced.interactions) == find_successors(turns)
