"""LoRA on a tiny model: what is trained, published, saved, and read by others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from agentrl_cli.engine.weights.weight_transfer import build_adapter_config
from agentrl_cli.errors import ModelError, RunFolderError, StoreError
from agentrl_cli.models.model_files import open_whole_model
from agentrl_cli.models.pretrained import load_merged_model, load_model
from agentrl_cli.train.learner import Learner

pytest.importorskip("peft", reason="needs peft (extra lora)")

SEQUENCES = [[5, 6, 7, 8, 9, 10], [11] * 9]


@pytest.fixture
def base(build_model, tmp_path: Path) -> Path:
    """A folder with the tiny model."""
    folder = tmp_path / "base"
    build_model(tied=True).save_pretrained(folder)
    return folder


@pytest.fixture
def make_learner(base: Path, build_config):
    def make(
        *, published: Any = "adapter", dtype: str = "float32", lora: Any = None, **train: Any
    ) -> Learner:
        adapter = {"lora": lora or {"rank": 4, "alpha": 8.0}}
        config = build_config(dtype=dtype, learning_rate=5e-2, model=adapter, **train)
        return Learner(load_model(str(base), "float32", "cpu"), config, published=published)

    return make


def find_moved(learner: Learner, batch: Any) -> tuple[set[str], set[str]]:
    """The names of all parameters, and of those that two updates change."""
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for version in range(2):
        learner.update(batch, version)
    after = learner.model.named_parameters()
    return set(before), {name for name, p in after if not torch.equal(p, before[name])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_adapter_moves(make_learner, ragged_batch, dtype):
    learner = make_learner(dtype=dtype)
    before, moved = find_moved(learner, ragged_batch)
    assert moved == {name for name in before if ".lora_" in name}
    assert not any("lm_head" in name or "embed" in name for name in moved)


def test_a_new_adapter_changes_nothing(make_learner, build_model, build_config):
    plain = Learner(build_model(tied=True), build_config())
    first, second = make_learner(), make_learner()
    assert first.compute_logprobs(SEQUENCES) == plain.compute_logprobs(SEQUENCES)
    again = second.weights()
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.weights().items())
    assert any(tensor.abs().sum() > 0 for tensor in again.values())


def test_merged_weights_are_the_adapted_model(make_learner, ragged_batch, build_model):
    learner = make_learner(published="whole")
    learner.update(ragged_batch, 0)
    plain = build_model(tied=True)
    missing, unexpected = plain.load_state_dict(learner.weights(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    check_same_logprobs(plain, learner)


def check_same_logprobs(plain: Any, learner: Learner, tolerance: float = 1e-5) -> None:
    """A plain forward pass of transformers against the learner's."""
    expected = learner.compute_logprobs(SEQUENCES)
    for ids, logprobs in zip(SEQUENCES, expected, strict=True):
        with torch.no_grad():
            logits = plain(torch.tensor([ids])).logits[0, :-1].float()
        found = torch.log_softmax(logits, dim=-1)
        found = found.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
        assert found.tolist() == pytest.approx(logprobs, abs=tolerance)


def test_a_saved_adapter_goes_on_bit_for_bit(make_learner, ragged_batch, tmp_path):
    for dtype in ("float32", "bfloat16"):
        learner = make_learner(dtype=dtype)
        learner.update(ragged_batch, 0)
        learner.save(tmp_path / dtype)
        learner.update(ragged_batch, 1)
        other = make_learner(dtype=dtype)
        other.load(tmp_path / dtype)
        other.update(ragged_batch, 1)
        assert other.step == learner.step
        expected = learner.weights()
        for name, tensor in other.weights().items():
            assert torch.equal(tensor, expected[name]), name


def test_a_spoilt_adapter_says_what_to_do(make_learner, tmp_path):
    learner = make_learner()
    learner.save(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    content = path.read_bytes()
    for spoilt in (b"", content[:100], content[: len(content) // 2], None):
        path.unlink() if spoilt is None else path.write_bytes(spoilt)
        with pytest.raises(StoreError, match=f"{tmp_path} is damaged.*Delete that folder"):
            learner.load(tmp_path)


def test_a_checkpoint_is_a_peft_folder_that_others_load(make_learner, ragged_batch, tmp_path, base):
    learner = make_learner()
    learner.update(ragged_batch, 0)
    folder = tmp_path / "checkpoint"
    learner.save(folder)
    assert not list(folder.glob("model*"))
    saved = load_file(folder / "adapter_model.safetensors")
    published = learner.weights()
    assert saved.keys() == published.keys()
    assert all(torch.equal(saved[name], published[name]) for name in saved)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    check_same_logprobs(AutoModelForCausalLM.from_pretrained(folder).eval(), learner)
    merged = load_model(str(folder), "float32", "cpu")
    assert not any("lora" in name for name, _ in merged.named_parameters())
    check_same_logprobs(merged, learner)


def test_an_adapter_that_lacks_tensors_is_refused(make_learner, tmp_path):
    make_learner().save(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    missing, *names = load_file(path)
    save_file({name: load_file(path)[name] for name in names}, path)
    with pytest.raises(ModelError, match=f"Found missing adapter keys.*{missing.split('.')[-3]}"):
        load_model(str(tmp_path), "float32", "cpu")


def test_servers_get_a_checkpoint_as_a_whole_model(
    make_learner, ragged_batch, tmp_path, base, tiny_tokenizer
):
    learner = make_learner()
    learner.update(ragged_batch, 0)
    learner.save(tmp_path / "c")
    tiny_tokenizer.save_pretrained(tmp_path / "c")
    with open_whole_model(str(tmp_path / "c"), "float32") as folder:
        whole = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert not any("lora" in name for name, _ in whole.named_parameters())
        check_same_logprobs(whole, learner)
        assert (Path(folder) / "tokenizer.json").is_file()
    assert not Path(folder).exists()
    with open_whole_model(str(base), "float32") as folder:
        assert folder == str(base)


def test_generation_flags_that_contradict_each_other_keep_no_server_from_starting(
    make_learner, tmp_path, base, tiny_tokenizer
):
    """transformers loads them with a warning, and refuses to save them."""
    learner = make_learner()
    flags = {"do_sample": False, "temperature": 0.7, "eos_token_id": 3}
    (base / "generation_config.json").write_text(json.dumps(flags))
    learner.save(tmp_path / "c")
    tiny_tokenizer.save_pretrained(tmp_path / "c")
    with open_whole_model(str(tmp_path / "c"), "float32") as folder:
        saved = json.loads((Path(folder) / "generation_config.json").read_text())
    assert (saved["temperature"], saved["eos_token_id"]) == (0.7, 3)


def test_what_a_transfer_writes_is_what_peft_reads(make_learner, ragged_batch, tmp_path, base):
    """The engine's room writes peft's format without peft."""
    from safetensors.torch import save_file

    learner = make_learner(lora={"rank": 3, "alpha": 7.0, "target_modules": ["q_proj", "up_proj"]})
    learner.update(ragged_batch, 0)
    lora = learner._config.model.lora
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(learner.weights(), folder / "adapter_model.safetensors")
    text = build_adapter_config(lora, learner.weights(), base_model=str(base))
    (folder / "adapter_config.json").write_text(text)
    assert json.loads(text)["target_modules"] == ["q_proj", "up_proj"]
    check_same_logprobs(load_merged_model(folder, torch.float32).eval(), learner)


def test_the_reference_is_the_model_without_its_adapter(make_learner, ragged_batch):
    learner = make_learner(algorithm={"kl": {"coef": 0.1}})
    first = learner.update(ragged_batch, 0)
    second = learner.update(ragged_batch, 1)
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl"] > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_changes_nothing(make_learner, ragged_batch, dtype):
    """The layers' inputs have no gradient below the first adapter."""
    plain, thrifty = (make_learner(dtype=dtype, gradient_checkpointing=on) for on in (False, True))
    plain_norm, thrifty_norm = (
        one.update(ragged_batch, 0)["grad_norm"] for one in (plain, thrifty)
    )
    assert thrifty.model.is_gradient_checkpointing
    assert thrifty_norm == pytest.approx(plain_norm, rel=1e-5)
    assert thrifty_norm > 0
    expected = plain.weights()
    for name, tensor in thrifty.weights().items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-4, rtol=0.0)


def test_an_adapter_on_the_output_head_is_trained_and_merged(
    build_model, build_config, ragged_batch
):
    """A head that is more than a matrix."""
    lora = {"rank": 4, "target_modules": ["lm_head", "q_proj"]}
    learner = Learner(build_model(), build_config(learning_rate=5e-2, model={"lora": lora}))
    _, moved = find_moved(learner, ragged_batch)
    assert {"lm_head.lora_A.default.weight", "lm_head.lora_B.default.weight"} <= moved
    assert all(".lora_" in name for name in moved)
    plain = build_model()
    plain.load_state_dict(learner.weights())
    check_same_logprobs(plain, learner)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("lm_head", "lm_head is the embeddings.*its output head shares"),
        ("embed_tokens", "embed_tokens is the embeddings.*its output head shares"),
        ("model.embed_tokens", "embed_tokens is the embeddings.*its output head shares"),
        ("nothing", r"target_modules.*nothing.*Allowed: all-linear.*q_proj"),
    ],
)
def test_targets_that_get_no_adapter_are_refused(make_learner, target, said):
    others = [] if target == "nothing" else ["q_proj"]
    with pytest.raises(ModelError, match=said):
        make_learner(lora={"target_modules": [*others, target]})


def test_a_checkpoint_of_another_adapter_is_refused(make_learner, ragged_batch, tmp_path):
    make_learner().save(tmp_path / "c")
    with pytest.raises(RunFolderError, match=r"saved with lora .*'rank': 4.*'rank': 2"):
        make_learner(lora={"rank": 2}).load(tmp_path / "c")


def test_an_adapter_whose_base_is_gone_says_so(make_learner, tmp_path, base):
    make_learner().save(tmp_path / "c")
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"trained on '.*base'.*base_model_name_or_path"):
        load_model(str(tmp_path / "c"), "float32", "cpu")


@pytest.mark.parametrize("published", ["adapter", "whole"])
def test_an_adapter_that_changes_nothing_yet_is_visible_before_the_first_step(
    make_learner, published
):
    learner = make_learner(published=published)
    prompt = [5, 6, 7, 8, 9]
    own = {name: tensor.clone() for name, tensor in learner.weights().items()}
    (before,) = learner.compute_logprobs([prompt])
    with learner.visibly_changed():
        (meanwhile,) = learner.compute_logprobs([prompt])
        changed = {n for n, t in learner.weights().items() if not torch.equal(t, own[n])}
    assert meanwhile != pytest.approx(before, abs=1e-2)
    assert len(changed) == sum(".lora_B." in n for n, _ in learner.model.named_parameters())
    assert all(torch.equal(tensor, own[name]) for name, tensor in learner.weights().items())
    assert learner.compute_logprobs([prompt]) == [before]
