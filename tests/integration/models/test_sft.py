from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl_cli.config.config_file import load_config_as
from agentrl_cli.config.sft_config import SftConfig
from agentrl_cli.errors import ConfigError, DatasetError, ModelError, RunError, StoppedError
from agentrl_cli.log import Observer, SilentObserver
from agentrl_cli.models import sft_training
from agentrl_cli.models.model_files import load_tokenizer
from agentrl_cli.models.pretrained import load_model
from agentrl_cli.models.sft_rows import EncodedRow
from agentrl_cli.models.sft_training import (
    compute_learning_rate,
    compute_summed_loss,
    train_and_save,
)

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_layers": 1, "num_heads": 2}


def write_rows(path: Path, pairs: list[tuple[str, str]]) -> None:
    rows = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in pairs
    ]
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))


@pytest.fixture
def build(tmp_path: Path) -> Any:
    path = tmp_path / "rows.jsonl"
    write_rows(path, [(f"What comes after {n}?", str(n + 1)) for n in range(40)])

    def build_config(name: str = "out", **changes: Any) -> SftConfig:
        data = {
            "output_path": str(tmp_path / name),
            "model": {"new": {"vocab_size": 320, **TINY}, "dtype": "float32"},
            "dataset": {"path": str(path)},
            "train": {"batch_tokens": 200, "learning_rate": 1e-2, "num_threads": 1},
        }
        for section, values in changes.items():
            data[section] = {**data[section], **values} if section in data else values
        return SftConfig.model_validate(data)

    return build_config


def run_sft(config: SftConfig, observer: Observer | None = None) -> Path:
    return train_and_save(config, config.model.path, observer or SilentObserver())


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Recorder(SilentObserver):
    def __init__(self) -> None:
        self.stages: list[tuple[str, int | None]] = []
        self.progress: list[tuple[int, str]] = []

    def on_stage(self, stage: str, total: int | None = None) -> None:
        self.stages.append((stage, total))

    def on_progress(self, num_done: int, note: str = "") -> None:
        self.progress.append((num_done, note))


def test_same_seed_gives_the_same_bits_and_the_callers_randomness_is_left_alone(build):
    threads = torch.get_num_threads()
    once = run_sft(build("a"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    again = run_sft(build("b"))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads
    other = run_sft(build("c", seed=2))
    assert read_all(once) == read_all(again)
    assert read_all(once)["model.safetensors"] != read_all(other)["model.safetensors"]


def test_it_learns_loads_and_reports(build):
    recorder = Recorder()
    folder = run_sft(build(train={"num_epochs": 8, "batch_tokens": 100}), recorder)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert not model.config.tie_word_embeddings
    ((stage, total),) = recorder.stages
    assert stage == "warm start"
    assert [done for done, _ in recorder.progress] == list(range(1, (total or 0) + 1))
    losses = [float(note.split()[-1]) for _, note in recorder.progress]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_going_on_from_a_model_keeps_its_tokenizer(build):
    first = run_sft(build("first"))
    changes = {"model": {"path": str(first), "new": None, "dtype": "bfloat16"}}
    second = run_sft(build("second", **changes))
    assert read_all(first)["tokenizer.json"] == read_all(second)["tokenizer.json"]
    assert load_model(str(second), "float32", "cpu").config.hidden_size == 16
    assert AutoModelForCausalLM.from_pretrained(second).dtype == torch.bfloat16


def test_loss_is_summed_over_trained_tokens_whatever_the_padding(build):
    model = load_model(str(run_sft(build())), "float32", "cpu")
    long = EncodedRow((5, 6, 7, 8, 9, 10), (False, False, True, False, True, True))
    short = EncodedRow((11, 12, 13), (True, False, True))
    with torch.no_grad():
        total, count = 0.0, 0
        for one in (long, short):
            logprobs = model(input_ids=torch.tensor([one.input_ids])).logits.log_softmax(-1)
            for place in range(1, len(one.input_ids)):
                if one.loss_mask[place]:
                    total -= logprobs[0, place - 1, one.input_ids[place]].item()
                    count += 1
        assert count == 4  # a first token has nothing before it to be predicted from
        assert compute_summed_loss(model, [long, short]).item() == pytest.approx(total, rel=1e-5)


def test_short_answers_are_as_frequent_as_in_the_rows(build, tmp_path):
    """Rows of one length share batches: weighed by the batch, short answers would win."""
    answers = ["n"] * 3 + ["y" + " y" * 30] * 7
    write_rows(tmp_path / "rows.jsonl", [("Q", answer) for answer in answers * 20])
    train = {"num_epochs": 6, "batch_tokens": 200, "min_learning_rate": 1e-4}
    folder = str(run_sft(build(train=train)))
    tokenizer, model = load_tokenizer(folder), load_model(folder, "float32", "cpu")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Q"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        chances = model(input_ids=prompt["input_ids"]).logits[0, -1].softmax(-1)
    assert chances[tokenizer.convert_tokens_to_ids("n")].item() == pytest.approx(0.3, abs=0.12)


def test_learning_rate_rises_and_falls(build):
    train = build(train={"learning_rate": 1.0, "min_learning_rate": 0.2, "warmup_steps": 4}).train
    rates = [compute_learning_rate(train, index, 24) for index in range(24)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[14] == pytest.approx(0.6)  # half of the cosine: midway between 1.0 and 0.2
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] > 0.2


def test_nothing_is_written_over_and_an_empty_folder_may_be_filled(build, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(ModelError, match="output_path=NEW_FOLDER"):
        run_sft(build())
    assert read_all(tmp_path / "out") == {"precious": b"x"}
    (tmp_path / "out" / "precious").unlink()
    assert (run_sft(build()) / "config.json").is_file()


def fail_to_write(self: object, folder: Path) -> None:
    folder.mkdir()
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        (
            {"learning_rate": 1e30, "max_grad_norm": 1e30, "num_epochs": 3},
            RunError,
            r"diverged\. Type train\.learning_rate=1e\+29",
        ),
        ({}, RunError, "No space left"),
        ({"max_row_tokens": 5}, DatasetError, r"row 1: \d+ tokens.*max_row_tokens=\d+"),
    ],
)
def test_what_fails_says_why_and_leaves_nothing(
    build, tmp_path, monkeypatch, train, error, message
):
    monkeypatch.setattr(sft_training.Qwen2ForCausalLM, "save_pretrained", fail_to_write)
    with pytest.raises(error, match=message):
        run_sft(build(train=train))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{}", "found neither of path and new"),
        ("{path: x, new: {}}", "found both of path and new"),
        ("{new: {num_layer: 2}}", "did you mean 'num_layers'"),
        ("{new: {hidden_size: 100, num_heads: 3}}", "multiple of 6"),
    ],
)
def test_bad_config(tmp_path, model, message):
    path = tmp_path / "sft.yaml"
    path.write_text(f"output_path: out\ndataset: {{path: x.jsonl}}\nmodel: {model}\n")
    with pytest.raises(ConfigError, match=message):
        load_config_as(SftConfig, path)


@pytest.mark.parametrize("num_checks", [3, 45])
def test_it_stops_between_rows_and_between_updates(build, tmp_path, num_checks):
    """Of 40 rows and then more than five updates."""
    calls = 0

    def check_stop() -> None:
        nonlocal calls
        calls += 1
        if calls == num_checks:
            raise StoppedError

    recorder = Recorder()
    with pytest.raises(StoppedError):
        train_and_save(build(train={"batch_tokens": 100}), None, recorder, check_stop)
    assert len(recorder.progress) == max(0, num_checks - 41)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
