"""The learner on a tiny model: what it learns, and what must not change it."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_cli.errors import ModelError, RunError, RunFolderError, StoreError
from agentrl_cli.train.learner import Learner


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights().items()}


#: Without it Adam makes whole steps of what rounding leaves where a gradient is 0.
STEADY = {"adam_epsilon": 1e-3}


def assert_close(left: dict, right: dict, tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=0.0, msg=name)


def differ(left: dict, right: dict) -> bool:
    return any(not torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("updates", [{}, {"num_minibatches": 2, "num_epochs": 2}])
def test_proximal_logprobs_are_those_from_before_the_step(
    build_model, build_config, build_trajectory, ragged_batch, updates
):
    learner = Learner(build_model(), build_config(learning_rate=1e-2, **updates))
    # Nothing stands before the first token of a call without a prompt.
    bare = [build_trajectory("bare", n, float(n), [([], [7, 8 + n])]) for n in range(2)]
    calls = [call for t in (*ragged_batch, *bare) for call in t.interactions]
    sequences = [[*call.prompt_ids, *call.completion_ids] for call in calls]
    before = learner.compute_logprobs(sequences, starts=[len(c.prompt_ids) for c in calls])
    metrics = learner.update([*ragged_batch, *bare], 0)
    assert metrics["num_updates"] == (4 if updates else 1)
    # The group without signal and the trajectory without a reward have not passed forward.
    expected = {
        call.id: [math.nan] * (len(call.completion_ids) - len(logprobs)) + logprobs
        for call, logprobs in zip(calls, before, strict=True)
        if not call.id.startswith(("g1/", "g2/2/")) and call.id[:4] != "g0/2"
    }
    assert learner.proximal_logprobs.keys() == expected.keys()
    for name, values in learner.proximal_logprobs.items():
        assert values.tolist() == pytest.approx(expected[name], abs=1e-4, nan_ok=True), name
    # A step that passes nothing forward has none.
    learner.update([build_trajectory("alone", 0, 1.0, [([1, 2], [3])])], 1)
    assert learner.proximal_logprobs == {}


def test_a_rewarded_token_becomes_probable(build_model, build_config, build_trajectory):
    learner = Learner(build_model(), build_config(learning_rate=1e-2))
    prompt, wanted = [5, 6, 7], 42
    before = math.exp(learner.compute_logprobs([[*prompt, wanted]], starts=[3])[0][0])
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        others = torch.randint(0, 97, (7,), generator=generator).tolist()
        batch = []
        for index, token in enumerate([wanted, *others]):
            logprob = learner.compute_logprobs([[*prompt, token]], starts=[3])[0][0]
            batch.append(
                build_trajectory(
                    f"s{step}", index, float(token == wanted), [(prompt, [token])], logprob=logprob
                )
            )
        learner.update(batch, step)
    after = math.exp(learner.compute_logprobs([[*prompt, wanted]], starts=[3])[0][0])
    assert before < 0.1
    assert after > 0.9


@pytest.mark.parametrize(
    ("aggregation", "num_minibatches"),
    [("token_mean", 1), ("token_mean", 2), ("trajectory_mean", 2), ("constant", 2)],
)
def test_micro_batches_change_nothing(
    build_model, build_config, ragged_batch, aggregation, num_minibatches
):
    results = []
    for budget in (1, 64, 100_000):
        config = build_config(
            algorithm={"aggregation": aggregation, "kl": {"coef": 0.1}},
            micro_batch_tokens=budget,
            num_minibatches=num_minibatches,
            **STEADY,
        )
        learner = Learner(build_model(), config, reference_model=build_model(3))
        results.append((learner.update(ragged_batch, 0), weights_of(learner)))
    assert results[0][0]["num_micro_batches"] > results[2][0]["num_micro_batches"]
    for metrics, weights in results[1:]:
        for name in ("loss", "grad_norm", "kl", "entropy", "logprob_gap_mean", "logprob_gap_max"):
            assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4), name
        assert_close(weights, results[0][1], 5e-6)


def test_turns_merged_or_apart_give_the_same_gradient(build_model, build_config, ragged_batch):
    merged = Learner(build_model(), build_config(**STEADY))
    apart = Learner(build_model(), build_config(export_style="individual", **STEADY))
    merged_metrics, apart_metrics = merged.update(ragged_batch, 0), apart.update(ragged_batch, 0)
    assert merged_metrics["num_samples"] < apart_metrics["num_samples"]
    # What the parted turns repeat is computed once.
    assert merged_metrics["train_tokens"] == apart_metrics["train_tokens"]
    assert merged_metrics["grad_norm"] == pytest.approx(apart_metrics["grad_norm"], rel=1e-4)
    assert_close(weights_of(merged), weights_of(apart), 5e-6)


@pytest.mark.parametrize("age", [0, 1])
def test_the_update_is_the_gradient_of_the_plain_formula(
    build_model, build_config, ragged_batch, age
):
    """One forward pass per turn of the stock model, the loss written out as in the papers; all
    tokens are of the newest policy version, or of the one before."""
    learner = Learner(build_model(), build_config(max_grad_norm=1e9))
    metrics = learner.update(ragged_batch, policy_version=age)
    model = build_model()
    loss, num_tokens = torch.zeros(()), 0
    for group in ("g0", "g1", "g2"):
        scored = [t for t in ragged_batch if t.group_id == group and t.reward is not None]
        rewards = torch.tensor([t.reward for t in scored])
        for trajectory in scored:
            advantage = (trajectory.reward - rewards.mean()) / (rewards.std() + 1e-6)
            for turn in trajectory.interactions:
                ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
                logprobs = model(ids).logits.log_softmax(-1)[0, :-1]
                new = logprobs.gather(1, ids[0, 1:, None])[len(turn.prompt_ids) - 1 :, 0]
                importance = (new.detach() - torch.tensor(turn.rollout_logprobs)).exp().clamp(max=2)
                importance = importance if age else torch.ones_like(importance)
                ratio = (new - new.detach()).exp()
                loss = loss - (importance * ratio * advantage).sum()
                num_tokens += new.numel()
    (loss / num_tokens).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert metrics["loss"] == pytest.approx(float(loss.detach() / num_tokens), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["token_age_mean"] == metrics["token_age_max"] == age
    assert metrics["off_policy_fraction"] == age
    assert (metrics["effective_sample_size"] == 1.0) == (age == 0)
    assert (metrics["importance_weight_max"] == 1.0) == (age == 0)


def test_no_signal_leaves_the_weights_alone(build_model, build_config, build_trajectory):
    learner = Learner(build_model(), build_config(weight_decay=0.1))
    before = weights_of(learner)
    batch = [build_trajectory("g", i, 1.0, [([1, 2], [3, 4])]) for i in range(3)]
    batch.append(build_trajectory("g", 3, None, [([1, 2], [3, 4])]))
    metrics = learner.update(batch, 0)
    assert not differ(before, weights_of(learner))
    assert metrics["num_updates"] == 0
    assert metrics["train_tokens"] == 0
    assert metrics["num_samples"] == 3


def test_an_update_is_the_same_bits_for_the_same_seed(build_model, build_config, ragged_batch):
    config = build_config(num_minibatches=2, num_epochs=2)
    # A minibatch of nothing but g1, which has no signal, would make no update.
    ragged_batch = [t for t in ragged_batch if t.group_id != "g1"]
    runs = []
    for _ in range(2):
        learner = Learner(build_model(), config)
        runs.append([learner.update(ragged_batch, 0) for _ in range(2)])
        weights = weights_of(learner)
        runs[-1].append(weights)
    assert not differ(runs[0][2], runs[1][2])
    for metrics in (*runs[0][:2], *runs[1][:2]):
        metrics.pop("train_seconds")
        metrics.pop("logprob_seconds")
    assert runs[0][:2] == runs[1][:2]
    assert runs[0][0]["num_updates"] == 4


def test_several_updates_are_held_by_the_proximal_policy(build_model, build_config, ragged_batch):
    once = Learner(build_model(), build_config()).update(ragged_batch, 0)
    often = Learner(build_model(), build_config(num_epochs=4)).update(ragged_batch, 0)
    assert once["approx_kl"] == pytest.approx(0.0, abs=1e-7)
    assert once["clipfrac"] == 0.0
    assert often["approx_kl"] > 1e-3
    assert often["clipfrac"] > 0.0
    assert often["logprob_gap_mean"] == pytest.approx(once["logprob_gap_mean"], rel=1e-5)


def test_gradient_checkpointing_changes_nothing(build_model, build_config, ragged_batch):
    config = build_config(num_epochs=2, gradient_checkpointing=True, **STEADY)
    plain = Learner(build_model(), build_config(num_epochs=2, **STEADY))
    thrifty = Learner(build_model(), config)
    plain.update(ragged_batch, 0)
    thrifty.update(ragged_batch, 0)
    assert thrifty.model.is_gradient_checkpointing
    assert_close(weights_of(plain), weights_of(thrifty), 5e-6)


def test_positions_in_bfloat16_are_as_exact_as_an_engine_has_them(build_model, build_config):
    """An engine loads the weights in bfloat16, and has the frequencies of positions in float32."""
    config = build_config(
        dtype="bfloat16", algorithm={"kind": "ppo", "kl": {"coef": 0.1}}, critic={}
    )
    models = [build_model(seed) for seed in range(3)]
    expected = dict(models[0].named_buffers())["model.rotary_emb.inv_freq"].clone()
    policy, reference, critic = models
    Learner(policy, config, reference_model=reference, critic_model=critic)
    for model in models:
        assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
        found = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
        torch.testing.assert_close(found, expected, atol=0.0, rtol=0.0)


def test_bfloat16_keeps_float32_masters(build_model, build_config, ragged_batch):
    """A step of 1e-5 is far below bfloat16's resolution at 0.3 (about 1e-3): without
    masters a hundred of them would still be nothing."""
    learner = Learner(build_model(), build_config(dtype="bfloat16", learning_rate=1e-5))
    before = learner._policy.optimizer.master_weights()["model.layers.0.mlp.up_proj.weight"].clone()
    metrics = learner.update(ragged_batch, 0)
    after = learner._policy.optimizer.master_weights()["model.layers.0.mlp.up_proj.weight"]
    assert learner.model.dtype == torch.bfloat16
    assert after.dtype == torch.float32
    assert 0 < float((after - before).abs().max()) < 2e-5
    assert metrics["grad_norm"] > 0
    exact = Learner(build_model(), build_config()).update(ragged_batch, 0)
    assert metrics["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.05)
    assert metrics["loss"] == pytest.approx(exact["loss"], abs=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_learner_goes_on_bit_for_bit(
    build_model, build_config, ragged_batch, tmp_path: Path, dtype, tied
):
    config = build_config(dtype=dtype, num_minibatches=2, learning_rate_schedule="cosine")
    learner = Learner(build_model(tied=tied), config)
    learner.update(ragged_batch, 0)
    learner.save(tmp_path / "checkpoint")
    expected = learner.update(ragged_batch, 1), weights_of(learner)

    resumed = Learner(build_model(9, tied=tied), config)
    resumed.load(tmp_path / "checkpoint")
    assert resumed.step == 1
    metrics = resumed.update(ragged_batch, 1)
    assert not differ(weights_of(resumed), expected[1])
    assert {k: v for k, v in metrics.items() if not k.endswith("_seconds")} == {
        k: v for k, v in expected[0].items() if not k.endswith("_seconds")
    }


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_is_a_hugging_face_model(
    build_model, build_config, ragged_batch, tmp_path: Path, tied
):
    learner = Learner(build_model(tied=tied), build_config())
    learner.update(ragged_batch, 0)
    learner.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(10)[None]
    logprobs = loaded(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert learner.compute_logprobs([ids[0].tolist()])[0] == pytest.approx(
        logprobs.tolist(), abs=1e-5
    )
    assert loaded.config._attn_implementation == "sdpa"
    pickles = [p for p in tmp_path.rglob("*") if p.suffix in {".bin", ".pt", ".pth", ".pkl"}]
    assert pickles == []


def test_loading_says_what_is_wrong(build_model, build_config, tmp_path: Path):
    learner = Learner(build_model(), build_config())
    with pytest.raises(RunFolderError, match=r"learner/state\.json is missing"):
        learner.load(tmp_path)
    learner.step = 1
    learner.save(tmp_path)
    other = Learner(build_model(), build_config(dtype="bfloat16"))
    with pytest.raises(RunFolderError, match=r"dtype 'float32', this run has 'bfloat16'"):
        other.load(tmp_path)
    fresh = Learner(build_model(), build_config())
    for name in ("model", "learner/optimizer", "learner/random_states"):
        path = tmp_path / f"{name}.safetensors"
        content = path.read_bytes()
        for spoilt in (b"", content[:4], content[: len(content) // 2]):
            path.write_bytes(spoilt)
            with pytest.raises(StoreError, match=rf"{tmp_path} is damaged.*Delete that folder"):
                fresh.load(tmp_path)
        path.write_bytes(content)
        # With step 1 and the weights of step 0 it would train the wrong batch.
        assert fresh.step == 0
    fresh.load(tmp_path)
    path = tmp_path / "learner" / "state.json"
    for version in ("99", "null"):
        path.write_text(re.sub(r"\d+", version, path.read_text(), count=1))
        with pytest.raises(RunFolderError, match=r"format (99|None), and this .* reads format 1"):
            learner.load(tmp_path)
    path.write_text("[1]")
    with pytest.raises(RunFolderError, match="format None"):
        learner.load(tmp_path)


def test_a_gradient_that_is_not_finite_stops(build_model, build_config, ragged_batch):
    learner = Learner(build_model(), build_config())
    handle = learner.model.model.norm.weight.register_hook(lambda g: g * torch.inf)
    before = weights_of(learner)
    with pytest.raises(RunError, match="step 1: the gradient's norm is"):
        learner.update(ragged_batch, 0)
    handle.remove()
    assert not differ(before, weights_of(learner))
    learner.update(ragged_batch, 0)
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(learner).values())


def test_kl_pulls_towards_the_reference(build_model, build_config, build_trajectory):
    """Equal rewards leave the KL term alone: it must fall."""
    config = build_config(algorithm={"kl": {"coef": 1.0}}, learning_rate=3e-3)
    learner = Learner(build_model(), config, reference_model=build_model(3))
    batch = [build_trajectory("g", i, 1.0, [([1, 2], [3, 4, 5])]) for i in range(2)]
    history = [learner.update(batch, step)["kl"] for step in range(40)]
    assert history[0] > 0.1
    assert history[-1] < 0.1 * history[0]


def test_what_cannot_be_trained_is_refused(build_model, build_config):
    with pytest.raises(ValueError, match="reference_model"):
        Learner(build_model(), build_config(algorithm={"kl": {"coef": 0.1}}))
    model = build_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        Learner(model, build_config())


def test_weights_come_once_when_tied(build_model, build_config):
    tied = Learner(build_model(tied=True), build_config()).weights()
    untied = Learner(build_model(), build_config()).weights()
    assert set(untied) - set(tied) == {"lm_head.weight"}


@torch.no_grad()
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}])
def test_logprobs_of_ragged_lists_equal_separate_forward_passes(
    build_model, build_config, sampling: dict[str, Any]
):
    learner, plain = Learner(build_model(), build_config()), build_model()
    lists = [[1, 2, 3, 4, 5, 6], [7], [8, 9], list(range(80))]
    found = learner.compute_logprobs(lists, starts=[3, 1, 1, 70], **sampling)
    assert [len(f) for f in found] == [3, 0, 1, 10]
    for ids, start, logprobs in zip(lists, [3, 1, 1, 70], found, strict=True):
        logits = plain(torch.tensor([ids])).logits[0] / sampling.get("temperature", 1.0)
        expected = [float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in range(start, len(ids))]
        assert logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("packing", ["plain", "prefix_tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_unmoved_policy_is_its_own_proximal_one(
    build_model, build_config, ragged_batch, dtype, packing
):
    """To the bit, in every minibatch of every epoch: packed otherwise, it would be off by rounding,
    which GSPO's narrow range clips."""
    config = build_config(
        dtype=dtype, packing=packing, num_minibatches=3, num_epochs=3, learning_rate=1e-30,
        algorithm={"kind": "gspo", "kl": {"coef": 0.1}},
    )  # fmt: skip
    learner = Learner(build_model(), config, reference_model=build_model())
    metrics = learner.update(ragged_batch, 0)
    assert metrics["num_updates"] > 3
    assert (metrics["clipfrac"], metrics["approx_kl"], metrics["kl"]) == (0.0, 0.0, 0.0)
