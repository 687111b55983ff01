"""Every recipe and term through the learner: one update, and what it must be equal to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl_cli.records import Trajectory
from agentrl_cli.train.learner import Learner

#: Without it Adam makes whole steps of what rounding leaves where a gradient is 0.
STEADY = {"adam_epsilon": 1e-3}
RECIPES = ["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "maxrl", "gspo", "cispo", "sapo"]


def weights_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def find_largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_makes_what_was_rewarded_more_probable(
    build_model, build_config, build_trajectory, kind
):
    learner = Learner(build_model(), build_config(algorithm={"kind": kind}, learning_rate=1e-3))
    prompt, good, bad = [5, 6, 7], [42, 3, 11], [13, 14]

    def score(completion: list[int]) -> float:
        return sum(learner.compute_logprobs([[*prompt, *completion]], starts=[3])[0])

    before = score(good), score(bad)
    batch = [
        build_trajectory("g", 0, 1.0, [(prompt, good)]),
        build_trajectory("g", 1, 0.0, [(prompt, bad)]),
    ]
    metrics = learner.update(batch, 0)
    assert score(good) > before[0]
    assert score(bad) < before[1]
    assert all(math.isfinite(value) for value in metrics.values())


def test_on_policy_and_with_the_same_advantages_the_losses_agree(
    build_model, build_config, ragged_batch
):
    """The one update of a step has ratio 1: the losses differ in what follows only."""
    results = {}
    for loss in ("decoupled_ppo", "gspo", "cispo", "sapo", "reinforce"):
        learner = Learner(build_model(), build_config(algorithm={"loss": {"kind": loss}}, **STEADY))
        results[loss] = learner.update(ragged_batch, 0)["grad_norm"], weights_of(learner)
    for norm, weights in results.values():
        assert norm == pytest.approx(results["decoupled_ppo"][0], rel=1e-4)
        assert find_largest_gap(weights, results["decoupled_ppo"][1]) < 2e-6


def test_the_gradient_of_the_entropy_bonus_is_that_of_the_plain_formula(
    build_model, build_config, build_trajectory
):
    batch = [build_trajectory("g", index, 1.0, [([5, 6], [7, 8])]) for index in range(2)]
    config = build_config(algorithm={"entropy_coef": 0.1}, max_grad_norm=1e9)
    metrics = Learner(build_model(), config).update(batch, 0)
    assert metrics["num_updates"] == 1
    assert metrics["loss"] == pytest.approx(-0.1 * metrics["entropy"], rel=1e-5)
    model = build_model()
    logprobs = model(torch.tensor([[5, 6, 7, 8]])).logits[0, 1:3].log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
    (-0.1 * entropy).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert metrics["entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_kl_in_the_reward_is_the_reward_less_the_divergence(
    build_model, build_config, ragged_batch, kind
):
    """The same update as without it on rewards from which it was taken off by hand."""
    kl: dict[str, Any] = {"coef": 0.05, "place": "reward"}
    config = build_config(algorithm={"kind": kind, "kl": kl}, **STEADY)
    penalized = Learner(build_model(), config, reference_model=build_model(3))
    metrics = penalized.update(ragged_batch, 0)

    reference = Learner(build_model(3), build_config())
    reduced: list[Trajectory] = []
    for trajectory in ragged_batch:
        divergence = 0.0
        for turn in trajectory.interactions:
            ids = [*turn.prompt_ids, *turn.completion_ids]
            logprobs = reference.compute_logprobs([ids], starts=[len(turn.prompt_ids)])[0]
            divergence += sum(turn.rollout_logprobs) - sum(logprobs)
        reduced.append(change_reward(trajectory, -0.05 * divergence))
    by_hand = Learner(build_model(), build_config(algorithm={"kind": kind}, **STEADY))
    expected = by_hand.update(reduced, 0)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert find_largest_gap(weights_of(penalized), weights_of(by_hand)) < 2e-6
    assert metrics["kl_penalty_mean"] != 0.0
    assert "kl_penalty_mean" not in expected


def test_a_penalty_for_length_is_taken_off(build_model, build_config, ragged_batch):
    overlong = {"buffer_tokens": 6, "max_tokens": 8}
    config = build_config(algorithm={"overlong": overlong}, **STEADY)
    penalized = Learner(build_model(), config)
    metrics = penalized.update(ragged_batch, 0)
    amounts = [
        min(max((t.num_completion_tokens - 2) / 6, 0.0), 1.0) if t.reward is not None else 0.0
        for t in ragged_batch
    ]
    assert len(set(amounts)) > 3
    reduced = [change_reward(t, -a) for t, a in zip(ragged_batch, amounts, strict=True)]
    by_hand = Learner(build_model(), build_config(**STEADY))
    expected = by_hand.update(reduced, 0)
    assert metrics["overlong_penalty_mean"] == pytest.approx(sum(amounts) / len(amounts))
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert find_largest_gap(weights_of(penalized), weights_of(by_hand)) < 2e-6


def change_reward(trajectory: Trajectory, amount: float) -> Trajectory:
    if trajectory.reward is None:
        return trajectory
    return dataclasses.replace(
        trajectory,
        reward=trajectory.reward + amount,
        interactions=tuple(
            dataclasses.replace(turn, turn_return=turn.turn_return + amount)
            for turn in trajectory.interactions
        ),
    )
