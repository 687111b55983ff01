"""The critic on a tiny model: what it learns, what the policy makes of it, and its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_cli.errors import NotFiniteError, RunFolderError, StoreError
from agentrl_cli.train.data.samples import build_samples
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.model.critic import Critic, ValueModel

PPO = {"kind": "ppo"}


def critic_of(learner: Learner) -> Critic:
    assert learner._critic is not None
    return learner._critic


def policy_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


def critic_weights(learner: Learner) -> dict[str, torch.Tensor]:
    weights = critic_of(learner).optimizer.master_weights()
    return {name: tensor.clone() for name, tensor in weights.items()}


def differ(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return any(not torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def build_learner(build_model, build_config):
    """A learner with a critic from the policy's weights; keyword arguments go into ``train``."""

    def build(seed: int = 0, *, dtype: str = "float32", **train: Any) -> Learner:
        critic = {"learning_rate": 1e-2, **train.pop("critic", {})}
        algorithm = {**PPO, **train.pop("algorithm", {})}
        config = build_config(dtype=dtype, algorithm=algorithm, critic=critic, **train)
        return Learner(build_model(seed), config, critic_model=build_model(seed))

    return build


@pytest.mark.slow
def test_a_new_critic_expects_nothing_and_then_the_return(build_learner, ragged_batch):
    learner = build_learner(critic={"clip_range": None}, learning_rate=1e-9)
    history = [learner.update(ragged_batch, 0) for _ in range(60)]
    assert history[0]["value_mean"] == 0.0
    assert history[0]["explained_variance"] == 0.0
    assert history[-1]["explained_variance"] > 0.95
    assert history[-1]["value_loss"] < 0.05 * history[0]["value_loss"]
    assert history[-1]["value_mean"] == pytest.approx(history[-1]["return_mean"], abs=0.05)


def test_the_value_loss_is_the_plain_formula(build_model, build_learner, ragged_batch):
    """One forward pass per turn of the stock model's layers, a head on the token before each."""
    learner = build_learner()
    critic = critic_of(learner)
    generator = torch.Generator().manual_seed(3)
    head = (torch.randn(32, generator=generator) * 0.1).requires_grad_()
    bias = torch.tensor(0.25, requires_grad=True)
    with torch.no_grad():
        critic.value_model.head.weight.copy_(head[None])
        critic.value_model.head.bias.fill_(bias)
    metrics = learner.update(ragged_batch, 0)

    model, losses = build_model().model, []
    for trajectory in ragged_batch:
        if trajectory.reward is None:
            continue
        for turn in trajectory.interactions:
            ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
            states = model(ids).last_hidden_state[0, len(turn.prompt_ids) - 1 : -1]
            losses.append((states @ head + bias - trajectory.reward) ** 2 / 2)
    loss = torch.cat(losses).mean()
    loss.backward()
    gradients = [p.grad for p in (*model.parameters(), head, bias) if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert metrics["value_loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["critic_grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["value_clipfrac"] == 0.0


def test_the_policy_is_pulled_by_return_less_value(build_model, build_learner, ragged_batch):
    """A new critic says 0: without normalization every token's advantage is its return."""
    learner = build_learner(
        algorithm={"advantage": {"normalization": "none"}}, max_grad_norm=1e9, num_minibatches=1
    )
    metrics = learner.update(ragged_batch, 0)
    model, loss, num_tokens = build_model(), torch.zeros(()), 0
    for trajectory in ragged_batch:
        for turn in trajectory.interactions if trajectory.reward is not None else ():
            ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
            logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
            new = logprobs.gather(1, ids[0, 1:, None])[len(turn.prompt_ids) - 1 :, 0]
            loss = loss - ((new - new.detach()).exp() * trajectory.reward).sum()
            num_tokens += new.numel()
    (loss / num_tokens).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert metrics["loss"] == pytest.approx(float(loss.detach() / num_tokens), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_equal_rewards_of_a_group_teach_too(build_learner, build_trajectory):
    """Where GRPO learns nothing, the critic knows what other tasks give."""
    learner = build_learner()
    before = policy_weights(learner)
    batch = [
        build_trajectory(f"g{group}", index, float(group), [([1, group], [3, 4 + index])])
        for group in range(2)
        for index in range(2)
    ]
    metrics = learner.update(batch, 0)
    assert metrics["num_updates"] == 1
    assert differ(before, policy_weights(learner))


def test_the_critic_learns_alone_at_first(build_learner, ragged_batch):
    """And by a learning rate of its own, which follows the schedule."""
    learner = build_learner(critic={"warmup_steps": 2}, learning_rate=1e-3, warmup_steps=2)
    before = policy_weights(learner)
    first, second = (learner.update(ragged_batch, 0) for _ in range(2))
    assert first["num_updates"] == second["num_updates"] == 0
    assert not differ(before, policy_weights(learner))
    assert second["value_loss"] < first["value_loss"]
    assert (first["learning_rate"], second["learning_rate"]) == (5e-4, 1e-3)
    assert (first["critic_learning_rate"], second["critic_learning_rate"]) == (5e-3, 1e-2)
    assert learner.update(ragged_batch, 0)["num_updates"] == 1
    assert differ(before, policy_weights(learner))


def test_a_step_of_several_updates_holds_values_near_the_old_ones(build_learner, ragged_batch):
    free, held = (
        build_learner(num_epochs=8, critic={"clip_range": clip, "learning_rate": 3e-2})
        for clip in (None, 0.05)
    )
    free_metrics, held_metrics = free.update(ragged_batch, 0), held.update(ragged_batch, 0)
    assert free_metrics["num_updates"] == held_metrics["num_updates"] == 8
    assert free_metrics["value_clipfrac"] == 0.0
    assert held_metrics["value_clipfrac"] > 0.2
    assert held_metrics["value_loss"] > free_metrics["value_loss"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_learner_goes_on_bit_for_bit(build_learner, ragged_batch, tmp_path: Path, dtype):
    settings: dict[str, Any] = {"dtype": dtype, "num_minibatches": 2, "num_epochs": 2}
    learner = build_learner(**settings)
    learner.update(ragged_batch, 0)
    learner.save(tmp_path / "checkpoint")
    expected = learner.update(ragged_batch, 1)

    resumed = build_learner(9, **settings)
    resumed.load(tmp_path / "checkpoint")
    metrics = resumed.update(ragged_batch, 1)
    assert not differ(critic_weights(resumed), critic_weights(learner))
    assert not differ(policy_weights(resumed), policy_weights(learner))
    for name in ("train_seconds", "logprob_seconds"):
        expected.pop(name), metrics.pop(name)
    assert metrics == expected


def test_a_checkpoint_with_a_critic_is_not_one_without(
    build_model, build_config, build_learner, ragged_batch, tmp_path: Path
):
    with_critic, without = build_learner(), Learner(build_model(), build_config())
    with_critic.save(tmp_path / "with")
    without.save(tmp_path / "without")
    with pytest.raises(RunFolderError, match="critic 'Qwen2Model', this run has None"):
        without.load(tmp_path / "with")
    with pytest.raises(RunFolderError, match="critic None, this run has 'Qwen2Model'"):
        with_critic.load(tmp_path / "without")
    path = tmp_path / "with" / "critic" / "master_weights.safetensors"
    path.write_bytes(path.read_bytes()[:4])
    with pytest.raises(StoreError, match="is damaged"):
        with_critic.load(tmp_path / "with")
    path.unlink()
    with pytest.raises(StoreError, match="critic/ has no weights"):
        with_critic.load(tmp_path / "with")


def test_a_critic_is_asked_for(build_model, build_config):
    with pytest.raises(ValueError, match="critic_model"):
        Learner(build_model(), build_config(algorithm=PPO))
    with pytest.raises(ValueError, match=r"no train\.critic"):
        Critic(build_model(), build_config(), torch.device("cpu"))


def test_an_adapter_on_the_policy_is_one_on_the_critic(
    build_model, build_config, ragged_batch, tmp_path: Path
):
    pytest.importorskip("peft")
    lora = {"lora": {"rank": 4, "alpha": 8.0}}
    config = build_config(algorithm=PPO, critic={"learning_rate": 1e-2}, model=lora)
    learner = Learner(build_model(), config, critic_model=build_model())
    trained = critic_weights(learner)
    assert all(".lora_" in name or name.startswith("head.") for name in trained)
    first = learner.update(ragged_batch, 0)
    for _ in range(30):
        last = learner.update(ragged_batch, 0)
    assert last["value_loss"] < 0.3 * first["value_loss"]
    layer = build_model().model.layers[0].mlp.up_proj.weight
    adapted = critic_of(learner).value_model.model.layers[0].mlp.up_proj
    assert torch.equal(adapted.base_layer.weight, layer)

    learner.save(tmp_path)
    resumed = Learner(build_model(), config, critic_model=build_model())
    resumed.load(tmp_path)
    assert not differ(critic_weights(resumed), critic_weights(learner))
    expected, metrics = learner.update(ragged_batch, 0), resumed.update(ragged_batch, 0)
    assert metrics["value_loss"] == expected["value_loss"]


def test_frozen_embeddings_are_the_critics_too(build_model, build_config, ragged_batch):
    frozen = {"frozen": ["embeddings"]}
    config = build_config(algorithm=PPO, critic={"learning_rate": 1e-2}, model=frozen)
    learner = Learner(build_model(), config, critic_model=build_model())
    assert not any("embed" in name for name in critic_weights(learner))
    for _ in range(2):
        learner.update(ragged_batch, 0)
    critic = critic_of(learner).value_model.model
    assert torch.equal(critic.embed_tokens.weight, build_model().model.embed_tokens.weight)
    assert not torch.equal(
        critic.layers[0].mlp.up_proj.weight, build_model().model.layers[0].mlp.up_proj.weight
    )


def test_values_that_are_not_finite_stop_the_run(build_learner, ragged_batch):
    learner = build_learner()
    with torch.no_grad():
        critic_of(learner).value_model.head.bias.fill_(torch.inf)
    before = policy_weights(learner)
    with pytest.raises(NotFiniteError, match=r"g0/0: the critic gives values that are not finite"):
        learner.update(ragged_batch, 0)
    assert not differ(before, policy_weights(learner))


def test_a_return_beyond_measure_stops_and_says_what_to_type(build_learner, build_trajectory):
    learner = build_learner()
    batch = [build_trajectory("g", i, 1e30 * i, [([1], [2, 3])]) for i in range(2)]
    before = critic_weights(learner)
    with pytest.raises(NotFiniteError, match=r"step 1: in the critic, the loss is inf") as caught:
        learner.update(batch, 0)
    assert "train.critic.learning_rate=0.005" in str(caught.value)
    assert not differ(before, critic_weights(learner))


def test_the_new_head_is_0_in_float32_whatever_the_layers_are(
    build_model, build_learner, build_trajectory
):
    assert not ValueModel(build_model()).head.weight.any()
    [sample] = build_samples([build_trajectory("g", 0, 1.0, [([1, 2], [3, 4])])], "concat")
    values = critic_of(build_learner(dtype="bfloat16")).score([sample])[id(sample)]
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.0]


def test_the_head_stays_float32_and_learns_small_steps(build_learner, ragged_batch):
    learner = build_learner(dtype="bfloat16")
    learner.update(ragged_batch, 0)
    model = critic_of(learner).value_model
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    for name, weight in model.head.named_parameters():
        assert torch.equal(weight, critic_weights(learner)[f"head.{name}"])
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, weight.bfloat16().float())
