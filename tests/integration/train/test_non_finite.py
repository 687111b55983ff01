"""Numbers that are not finite: named, and kept out of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl_cli.errors import NotFiniteError
from agentrl_cli.train.learner import Learner

WARN = {"not_finite": {"action": "warn"}}


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def spoil_advantage(monkeypatch: pytest.MonkeyPatch, trajectory_id: str, value: float) -> None:
    """Gives the first target of a trajectory an advantage that is not finite."""
    from agentrl_cli.train import step_updates as module

    assign = module.assign_advantages

    def spoiled(samples: Any, advantages: Any) -> Any:
        assigned = assign(samples, advantages)
        for sample in assigned:
            if sample.trajectory_id == trajectory_id:
                sample.targets.advantages[0] = value
        return assigned

    monkeypatch.setattr(module, "assign_advantages", spoiled)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_step_and_the_trajectory_are_named(
    build_model, build_config, ragged_batch, monkeypatch, value
):
    spoil_advantage(monkeypatch, "g2/1", value)
    config = build_config()
    learner = Learner(build_model(), config)
    before = weights_of(learner)
    with pytest.raises(NotFiniteError) as caught:
        learner.update(ragged_batch, 0)
    text = str(caught.value)
    assert text.startswith("step 1: the loss is ")
    named = text.partition("(trajectories ")[2].partition(")")[0]
    assert "g2/1" in named.split(", ")
    assert "The weights are as they were" in text
    run = f"{config.output_dir}/{config.experiment_name}/{config.trial_name}"
    first = named.split(", ")[0]
    assert f"look: agentrl inspect-trajectories {run} {first} --tokens" in text
    assert "train.alarms.not_finite.action=warn" in text
    after = weights_of(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_finite_in_the_critic_is_said_to_be_its_own(
    build_model, build_config, ragged_batch
):
    config = build_config(
        algorithm={"kind": "ppo"}, critic={"learning_rate": 0.25}, micro_batch_tokens=24
    )
    learner = Learner(build_model(), config, critic_model=build_model())
    assert learner._critic is not None
    weights = learner._critic.optimizer.master_weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    learner._critic.value_model.head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(NotFiniteError) as caught:
        learner.update(ragged_batch, 0)
    text = str(caught.value)
    assert text.startswith("step 1: in the critic, the gradient's norm is ")
    assert "train.critic.learning_rate=0.125 often helps" in text
    after = learner._critic.optimizer.master_weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_update_that_may_be_left_out_is_and_the_others_are_made(
    build_model, build_config, ragged_batch, monkeypatch
):
    config = build_config(alarms=WARN, num_minibatches=3, num_epochs=2)
    spoil_advantage(monkeypatch, "g0/0", float("nan"))
    learner = Learner(build_model(), config)
    before = weights_of(learner)
    metrics = learner.update(ragged_batch, 0)
    assert metrics["num_skipped_updates"] == 2
    assert metrics["num_updates"] > 0
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values()), metrics
    after = weights_of(learner)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
