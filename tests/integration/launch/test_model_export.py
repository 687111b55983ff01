"""An exported checkpoint is what others load, and nothing half made is left of a refused one."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError, StoreError, UserInputError
from agentrl_cli.launch.model_export import export_checkpoint
from agentrl_cli.models.pretrained import load_model
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.learner import Learner

SEQUENCE = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.fixture
def base(tmp_path: Path, chat_tokenizer: Any, build_qwen2: Callable[..., Any]) -> Path:
    folder = tmp_path / "base"
    build_qwen2(chat_tokenizer).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def make_run(tmp_path: Path, base: Path, chat_tokenizer: Any):
    """A run folder with checkpoints of other weights at every step; it and the last learner."""

    def make(*steps: int, dataset: str = "openai/gsm8k", **model: Any) -> tuple[RunFolder, Learner]:
        config = ExperimentConfig.model_validate(
            {
                "experiment_name": "exp",
                "output_dir": str(tmp_path / "runs"),
                "model": {"path": str(base), "dtype": "float32", **model},
                "agent_builder_path": "a.b",
                "agent_builder_kwargs": {"api_key": "sk-secret-of-mine"},
                "train_dataset": {"path": dataset, "name": "main"},
                "valid_dataset": {"path": "valid.jsonl"},
                "train": {"total_steps": 50},
            }
        )
        learner = Learner(load_model(str(base), "float32", "cpu"), config, tokenizer=chat_tokenizer)
        with RunFolder.create_or_resume(config) as folder:
            for step in steps:
                with torch.no_grad():
                    for weight in learner.model.parameters():
                        if weight.requires_grad:
                            weight += 0.02 * step
                learner.step = step
                with folder.new_checkpoint(step) as path:
                    learner.save(path)
        return folder, learner

    return make


@torch.no_grad()
def compute_logprobs(model: Any) -> list[float]:
    logits = model(torch.tensor([SEQUENCE])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_is_the_learner_s(make_run, tmp_path: Path, chat_tokenizer, dtype: str) -> None:
    folder, learner = make_run(1, 2, dtype=dtype)
    to = tmp_path / "new" / "model"
    done = export_checkpoint(folder.path, to)
    assert (done.step, done.kind, done.folder) == (2, "model", to)
    loaded = AutoModelForCausalLM.from_pretrained(to)
    assert loaded.dtype == getattr(torch, dtype)
    tolerance = 1e-5 if dtype == "float32" else 0.05
    assert compute_logprobs(loaded) == pytest.approx(
        learner.compute_logprobs([SEQUENCE])[0], abs=tolerance
    )
    tokenizer = AutoTokenizer.from_pretrained(to)
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    expected, found = (t.apply_chat_template(messages) for t in (chat_tokenizer, tokenizer))
    assert dict(expected) == dict(found)
    assert GenerationConfig.from_pretrained(to).eos_token_id == chat_tokenizer.eos_token_id
    assert not (to / "learner").exists()
    assert [p.name for p in to.parent.iterdir()] == ["model"]


def test_which_checkpoint(make_run, tmp_path: Path) -> None:
    folder, _ = make_run(1, 2, 3)
    for step, reward in ((0, 0.9), (1, 0.4), (2, 0.8), (3, 0.1)):
        report = {"mean_reward": reward, "interval": [0.1, 0.95], "num_tasks": 7}
        folder.write_eval(step, [], report)
    checkpoint = folder.path / "checkpoints" / "step-000001"
    asked = [(folder.path, c) for c in (None, "last", "best", 1)]
    exported = [
        export_checkpoint(run, tmp_path / f"m{number}", choice=choice)
        for number, (run, choice) in enumerate([*asked, (checkpoint, None), (checkpoint, "last")])
    ]
    assert [one.step for one in exported] == [3, 3, 2, 1, 1, 3]
    assert exported[2].score is not None
    assert (exported[2].metric, exported[2].score.value) == ("mean_reward", 0.8)
    assert exported[2].better_before == 0.9
    card = (tmp_path / "m2" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "transformers"
    assert front["datasets"] == ["openai/gsm8k"]
    # A folder of this machine is no model of the hub.
    assert "base_model" not in front
    for text in ("| run | exp/t0 |", "| step | 2 of 50 |", "0.800 (95 %: 0.100 to 0.950), 7 tasks"):
        assert text in card
    assert "mean reward 0.900" in card
    assert "sk-secret" not in card


def test_an_adapter_alone_and_merged(make_run, tmp_path: Path, base: Path) -> None:
    folder, learner = make_run(2, lora={"rank": 4})
    done = export_checkpoint(folder.path, tmp_path / "adapter")
    assert done.kind == "adapter"
    assert not list((tmp_path / "adapter").glob("model*"))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    merged = export_checkpoint(folder.path, tmp_path / "merged", merge=True)
    assert merged.kind == "model"
    assert not list((tmp_path / "merged").glob("adapter*"))
    expected = learner.compute_logprobs([SEQUENCE])[0]
    assert expected != pytest.approx(compute_logprobs(load_model(str(base), "float32", "cpu")))
    for name in ("adapter", "merged"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert compute_logprobs(loaded) == pytest.approx(expected, abs=1e-5), name
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template
    cards = [(tmp_path / name / "README.md").read_text() for name in ("adapter", "merged")]
    assert "library_name: peft" in cards[0]
    # vLLM takes no rank below 8.
    assert f"vllm serve {base} --enable-lora --max-lora-rank 8 " in cards[0]
    assert "library_name: transformers" in cards[1]


def test_what_cannot_be_exported_is_refused(make_run, tmp_path: Path) -> None:
    folder, _ = make_run(3)
    before = sorted(tmp_path.rglob("*"))

    def check(error: type[Exception], match: str, run: Path, to: Path, **choices: Any) -> None:
        with pytest.raises(error, match=match):
            export_checkpoint(run, to, **choices)
        assert sorted(tmp_path.rglob("*")) == before

    run, to = folder.path, tmp_path / "to"
    check(RunFolderError, "Did you mean .*runs/exp/t0", run.with_name("t1"), to)
    taken = tmp_path / "base"
    check(UserInputError, f"a folder of that name exists.*--to {taken}-2", run, taken)
    check(UserInputError, "lies inside of the run folder", run, run / "model")
    check(RunFolderError, r"no checkpoint of step 2.*steps 3\. Type --step 3", run, to, choice=2)
    check(RunFolderError, "no checkpoint has an evaluation.*mean_reward", run, to, choice="best")
    check(UserInputError, "no adapter to merge.*Leave --merge out", run, to, merge=True)
    (tmp_path / "file").write_text("mine")
    before.append(tmp_path / "file")
    before.sort()
    check(UserInputError, "a file of that name exists", run, tmp_path / "file")
    # The nearest to a folder that may not be written to where tests run as root.
    inside = tmp_path / "file" / "to"
    check(StoreError, "cannot be written.*--to with a folder that you may write", run, inside)
    checkpoint = run / "checkpoints" / "step-000003"
    before = [path for path in before if path.name != "model.safetensors" or path.parent == taken]
    (checkpoint / "model.safetensors").unlink()
    check(StoreError, "is damaged: it holds no weights", run, to)
    shutil.rmtree(checkpoint)
    with pytest.raises(RunFolderError, match=r"no checkpoint yet.*Ctrl-C"):
        export_checkpoint(run, to)


def test_a_checkpoint_that_the_run_deletes_meanwhile(make_run, tmp_path: Path, monkeypatch) -> None:
    folder, _ = make_run(1)
    copy = shutil.copyfile

    def copy_while_pruned(source: Path, target: Path) -> None:
        if source.name == "model.safetensors":
            shutil.rmtree(source.parent)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy_while_pruned)
    with pytest.raises(RunFolderError, match=r"deleted while it was read.*--last"):
        export_checkpoint(folder.path, tmp_path / "to")
    assert not list(tmp_path.glob("*to*"))


@pytest.mark.parametrize("merge", [False, True])
def test_a_full_disk_leaves_nothing(make_run, tmp_path: Path, merge: bool) -> None:
    """A limit on the size of files stands for it: the kernel refuses the write all the same."""
    folder, _ = make_run(1, **({"lora": {"rank": 4}} if merge else {}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"disk \(or your quota\) is full.*step-000001 is as"):
            export_checkpoint(folder.path, tmp_path / "to", merge=merge)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.glob("*to*"))
    export_checkpoint(folder.path, tmp_path / "to", merge=merge)


@pytest.mark.parametrize("flags", [{"temperature": 0.7}, {"early_stopping": True}])
def test_a_model_whose_generation_flags_contradict_each_other_can_be_saved(
    make_run, base: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """Some on the hub are like that: transformers loads them, and refuses to save them."""
    path = base / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_sample": False} | flags))
    folder, learner = make_run(1)
    export_checkpoint(folder.path, tmp_path / "to")
    found = GenerationConfig.from_pretrained(tmp_path / "to")
    assert found.eos_token_id == learner.model.config.eos_token_id
    assert found.temperature == flags.get("temperature")
