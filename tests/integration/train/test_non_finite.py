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
def test_the_step_the_trajectory_and_the_quantity_are_named(
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
    assert "(trajectories g2/1; not finite there: advantages). The weights are as they were" in text
    run = f"{config.output_dir}/{config.experiment_name}/{config.trial_name}"
    assert f"look: agentrl inspect-trajectories {run} g2/1 --tokens" in text
    assert "train.alarms.not_finite.action=warn" in text
    after = weights_of(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_nan_weights_are_named_and_never_left_out(build_model, build_config, ragged_batch):
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    learner = Learner(model, build_config(alarms=WARN))
    with pytest.raises(NotFiniteError, match=r"not finite themselves: lm_head\.weight") as caught:
        learner.update(ragged_batch, 0)
    assert "new_logprobs" in str(caught.value)
    assert "checkpoint that the run started from is damaged" in str(caught.value)
    assert "not_finite.action=warn" not in str(caught.value)


def test_a_gradient_alone_is_traced_to_its_micro_batch(build_model, build_config, ragged_batch):
    """A layer's gradient overflows for one token id, which one trajectory alone has."""
    model = build_model()
    [one] = [t for t in ragged_batch if t.id == "g0/1"]
    ids = {i for t in ragged_batch if t is not one for c in t.interactions for i in c.prompt_ids}
    ids |= {i for t in ragged_batch for c in t.interactions for i in c.completion_ids}
    rare = next(i for c in one.interactions for i in c.prompt_ids if i not in ids)

    def overflow(_module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        is_rare = (arguments[0] == rare)[..., None]
        if output.requires_grad and bool(is_rare.any()):
            output.register_hook(lambda g: torch.where(is_rare, torch.inf, g))
        return output

    model.model.embed_tokens.register_forward_hook(overflow)
    learner = Learner(model, build_config(micro_batch_tokens=24))
    with pytest.raises(NotFiniteError, match="step 1: the gradient's norm is") as caught:
        learner.update(ragged_batch, 0)
    named = str(caught.value).partition("(trajectories ")[2].partition(")")[0].split(", ")
    assert "g0/1" in named
    assert len(named) < 5, "one micro-batch, not all"


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
