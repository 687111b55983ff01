"""Numbers that are not finite: the micro-batch is kept, and what is kept shows the same again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import NotFiniteError, StoreError
from agentrl_cli.inspector.micro_batch_view import inspect_micro_batch, list_bad
from agentrl_cli.store.micro_batch_file import (
    StoredMicroBatch,
    read_micro_batch,
    write_micro_batch,
)
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.losses import LossInputs, compute_loss

WARN = {"not_finite": {"action": "warn"}}


@pytest.fixture
def save(tmp_path: Path):
    """Keeps micro-batches in the test's folder; the paths so far are in ``saved``."""

    def write(step: int, facts: Mapping[str, Any], tensors: Any) -> Path:
        path = tmp_path / "micro-batches" / f"step-{step:06d}"
        write_micro_batch(path, facts, tensors)
        write.saved.append(path)  # type: ignore[attr-defined]
        return path

    write.saved = []  # type: ignore[attr-defined]
    return write


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def spoil_advantage(monkeypatch: pytest.MonkeyPatch, trajectory_id: str, value: float) -> None:
    """Gives the first target of a trajectory an advantage that is not finite."""
    from agentrl_cli.train import step_batch as module

    assign = module.assign_advantages

    def spoiled(samples: Any, advantages: Any) -> Any:
        assigned = assign(samples, advantages)
        for sample in assigned:
            if sample.trajectory_id == trajectory_id:
                sample.targets.advantages[0] = value
        return assigned

    monkeypatch.setattr(module, "assign_advantages", spoiled)


def recompute_loss(batch: StoredMicroBatch, config: ExperimentConfig) -> torch.Tensor:
    """The loss of what is stored, from nothing else."""
    values = {name: torch.from_numpy(value) for name, value in batch.tensors.items()}
    counts = torch.tensor([sample["num_targets"] for sample in batch.facts["samples"]])
    return compute_loss(
        LossInputs(
            new_logprobs=values["new_logprobs"],
            proximal_logprobs=values["proximal_logprobs"],
            rollout_logprobs=values["rollout_logprobs"],
            advantages=values["advantages"],
            sequence_numbers=torch.arange(len(counts)).repeat_interleave(counts),
            token_weights=values["token_weights"],
        ),
        config.train.algorithm,
    ).loss


def show(path: Path) -> str:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    inspect_micro_batch(path, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_nan_advantage_is_kept_and_reproduces_it(
    build_model, build_config, ragged_batch, monkeypatch, save
):
    spoil_advantage(monkeypatch, "g2/1", float("nan"))
    config = build_config(micro_batch_tokens=24)
    learner = Learner(build_model(), config)
    before = weights_of(learner)
    with pytest.raises(NotFiniteError) as caught:
        learner.update(ragged_batch, 0, save_fault=save)
    [path] = save.saved
    text = str(caught.value)
    assert text.startswith("step 1: the loss is nan, of ")
    assert f"agentrl inspect-micro-batch {path}" in text
    assert "train.alarms.not_finite.action=warn" in text
    batch = read_micro_batch(path)
    assert "g2/1" in [s["trajectory_id"] for s in batch.facts["samples"]]
    num_targets = sum(t.num_completion_tokens for t in ragged_batch if t.reward is not None)
    assert batch.tensors["advantages"].size < num_targets, "the offender alone, not the whole batch"
    assert torch.isnan(recompute_loss(batch, config))
    # Without that value it is a loss like any other.
    batch.tensors["advantages"][~torch.isfinite(torch.from_numpy(batch.tensors["advantages"]))] = 0
    assert torch.isfinite(recompute_loss(batch, config))
    after = weights_of(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_stored_tokens_give_the_stored_logprobs(
    build_model, build_config, ragged_batch, monkeypatch, save
):
    """By the stock model, one sample at a time: what is stored is enough to look for the cause."""
    spoil_advantage(monkeypatch, "g0/2", float("inf"))
    learner = Learner(build_model(), build_config(micro_batch_tokens=100_000))
    with pytest.raises(NotFiniteError, match="the loss is"):
        learner.update(ragged_batch, 0, save_fault=save)
    batch = read_micro_batch(save.saved[0])
    model, token, target = build_model(), 0, 0
    for sample in batch.facts["samples"]:
        ids = torch.from_numpy(batch.tensors["input_ids"][token : token + sample["num_tokens"]])
        end = target + sample["num_targets"]
        sources = torch.from_numpy(batch.tensors["sources"][target:end])
        targets = torch.from_numpy(batch.tensors["ids"][target:end])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)[sources, targets]
        stored = torch.from_numpy(batch.tensors["new_logprobs"][target:end])
        torch.testing.assert_close(stored, logprobs, atol=1e-4, rtol=0)
        assert torch.equal(ids[sources + 1], targets)
        token, target = token + sample["num_tokens"], end
    assert token == batch.tensors["input_ids"].size


def test_nan_weights_are_named_and_never_left_out(build_model, build_config, ragged_batch, save):
    model = build_model()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    learner = Learner(model, build_config(alarms=WARN))
    with pytest.raises(NotFiniteError, match=r"lm_head\.weight") as caught:
        learner.update(ragged_batch, 0, save_fault=save)
    assert "checkpoint that the run began with is damaged" in str(caught.value)
    assert "not_finite.action=warn" not in str(caught.value)
    batch = read_micro_batch(save.saved[0])
    assert batch.facts["weights_not_finite"] == ["lm_head.weight"]
    assert not torch.isfinite(torch.from_numpy(batch.tensors["new_logprobs"])).any()
    assert "the weight lm_head.weight has values that are not finite" in show(save.saved[0])


def test_a_gradient_alone_is_traced_to_its_micro_batch(
    build_model, build_config, ragged_batch, save
):
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
        learner.update(ragged_batch, 0, save_fault=save)
    assert "g0/1" in str(caught.value)
    samples = read_micro_batch(save.saved[0]).facts["samples"]
    assert "g0/1" in [s["trajectory_id"] for s in samples]
    assert len(samples) < 6
    assert "gradient alone is not" in show(save.saved[0])


def test_a_fault_of_the_critic_is_said_to_be_its_own_and_kept(
    build_model, build_config, ragged_batch, save
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
        learner.update(ragged_batch, 0, save_fault=save)
    text = str(caught.value)
    assert text.startswith("step 1: in the critic, the gradient's norm is ")
    assert "train.critic.learning_rate=0.125 often helps" in text
    batch = read_micro_batch(save.saved[0])
    count = sum(sample["num_targets"] for sample in batch.facts["samples"])
    num_targets = sum(t.num_completion_tokens for t in ragged_batch if t.reward is not None)
    assert 0 < count < num_targets, "one micro-batch, not all"
    for name in ("values", "old_values", "returns"):
        assert batch.tensors[name].shape == (count,), name
    after = learner._critic.optimizer.master_weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_update_that_may_be_left_out_is_and_the_others_are_made(
    build_model, build_config, ragged_batch, monkeypatch, save
):
    config = build_config(alarms=WARN, num_minibatches=3, num_epochs=2)
    spoil_advantage(monkeypatch, "g0/0", float("nan"))
    learner = Learner(build_model(), config)
    before = weights_of(learner)
    metrics = learner.update(ragged_batch, 0, save_fault=save)
    assert metrics["num_skipped_updates"] == 2
    assert metrics["num_updates"] > 0
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values()), metrics
    assert len(save.saved) == 1, "one a step tells enough"
    after = weights_of(learner)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_metrics_of_an_update_that_was_left_out_count_nowhere(
    build_model, build_config, ragged_batch, monkeypatch
):
    config = build_config(alarms=WARN)
    spoil_advantage(monkeypatch, "g0/0", float("nan"))
    metrics = Learner(build_model(), config).update(ragged_batch, 0)
    assert metrics["num_skipped_updates"] == 1
    assert metrics["num_updates"] == metrics["train_tokens"] == metrics["entropy"] == 0.0


def test_a_full_disk_does_not_hide_the_fault(build_model, build_config, ragged_batch, monkeypatch):
    def refuse(step: int, facts: Any, tensors: Any) -> Path:
        raise StoreError("the disk is full")

    spoil_advantage(monkeypatch, "g0/0", float("nan"))
    with pytest.raises(NotFiniteError) as caught:
        Learner(build_model(), build_config()).update(ragged_batch, 0, save_fault=refuse)
    assert "step 1: the loss is nan" in str(caught.value)
    assert "its micro-batch could not be saved: the disk is full" in str(caught.value)


def test_the_view_names_the_value_and_where_it_is(
    build_model, build_config, ragged_batch, monkeypatch, save, capsys
):
    spoil_advantage(monkeypatch, "g2/1", float("-inf"))
    learner = Learner(build_model(), build_config())
    with pytest.raises(NotFiniteError):
        learner.update(ragged_batch, 0, save_fault=save)
    [row] = list_bad(read_micro_batch(save.saved[0]))
    trajectory = next(t for t in ragged_batch if t.id == "g2/1")
    first = trajectory.interactions[0]
    assert row["advantages"] == "-inf"
    assert row["trajectory_id"] == "g2/1"
    assert row["interaction_id"] == first.id
    assert row["token_id"] == first.completion_ids[0]
    assert row["position"] == len(first.prompt_ids)
    assert isinstance(row["new_logprobs"], float)
    text = show(save.saved[0])
    assert "trained tokens with a value that is not finite (1)" in text
    assert "-inf" in text
    console = Console(file=io.StringIO())
    inspect_micro_batch(save.saved[0], as_json=True, console=console)
    data = json.loads(capsys.readouterr().out)
    assert data["not_finite"]["advantages"] == 1
    assert data["not_finite"]["new_logprobs"] == 0
    assert data["targets"] == [row]
