"""What a user may type or hand over: answered with what to type, and nothing is started."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.errors import ConfigError, DatasetError, ModelError, RunFolderError, StoreError
from agentrl_cli.rollout.dataset import load_rows
from agentrl_cli.store.checksums import check_checksums, checksummed_folder
from agentrl_cli.tracking.credit import parse_reward

BASE = (
    "experiment_name: demo\nmodel: {path: m}\nagent_builder_path: a.b\n"
    "train_dataset: {path: t.jsonl}\n"
)


def refuse_config(folder: Path, text: str = BASE, *overrides: str) -> str:
    path = folder / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def refuse_rows(path: Path | str, limit: int | None = None) -> str:
    with pytest.raises(DatasetError) as caught:
        load_rows(DatasetConfig(path=str(path), limit=limit), "train_dataset")
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=1180591620717411303424", "seed: 1180591620717411303424 is too large"),
        ("train.total_steps=99999999999", "total_steps"),
        ("rollout.timeout_seconds=.inf", "finite number"),
        ("train.learning_rate=.nan", "finite number"),
        ("rollout.timeout_seconds=1e300", "too large. Allowed: up to 1,000,000"),
        ("engine.num_threads=100000", "too large. Allowed: up to 1,024"),
        ("rollout.reward_workers=5000", "too large. Allowed: up to 1,024"),
        ("model.path=s3://bucket/model", "is an address"),
        ("model.path=", 'found ""'),
        ("output_dir=gcs://bucket/runs", "scheme 'gcs' is unknown; did you mean 'gs'?"),
        ("train_dataset.path=C:\\data\\t.jsonl", "is a Windows path"),
        ('train_dataset.path="a\\0b.jsonl"', "NUL"),
        ("trial_name=2001-99-99", "month must be in"),
        ("gconfig=" + "[" * 5000, "nested too deeply|not valid YAML"),
    ],
)
def test_values_that_no_machine_can_take(tmp_path, override, words) -> None:
    message = refuse_config(tmp_path, BASE, override)
    assert any(word in message for word in words.split("|")), message


def test_aliases_are_not_followed_without_end(tmp_path) -> None:
    """Nine levels of nine: 387 million entries."""
    bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n"
    for n in range(1, 9):
        bomb += f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]\n"
    started = time.monotonic()
    assert "more than 100,000 keys" in refuse_config(tmp_path, BASE + bomb)
    assert time.monotonic() - started < 30


def test_deep_yaml_is_refused(tmp_path) -> None:
    assert "nested too deeply" in refuse_config(tmp_path, BASE + "x: " + "[" * 100_000)


def test_a_pipe_is_no_file(tmp_path) -> None:
    os.mkfifo(tmp_path / "t.jsonl")
    assert "is a pipe" in refuse_rows(tmp_path / "t.jsonl")
    os.mkfifo(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="is a pipe"):
        load_config(tmp_path / "p.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path) -> None:
    for name, text in (("t.csv", "question,answer\n1,2\n"), ("t.jsonl", '{"question": "1"}\n')):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8-sig")
        assert "question" in load_rows(DatasetConfig(path=str(path)), "train_dataset")[0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deeper than 64 levels"),
        ("t.jsonl", b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "deeper than 64 levels"),
        ("t.jsonl", b'{"question": "\\ud83d"}', "half of a surrogate pair"),
        ("t.json", b'[{"n": ' + b"9" * 5000 + b"}]", "not usable"),
        ("t.csv", b"a,b\n" + b"x" * 200_000 + b",1\n", "field larger"),
        ("t.csv", b"a,b\n\xff\xfe,1\n", "UTF-8"),
        ("t.parquet", b"PAR1" + b"\0" * 200 + b"PAR1", "damaged"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path, name, content, words) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = refuse_rows(path)
    assert words in message
    assert name in message


def test_a_damaged_parquet_file_is_refused(tmp_path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"a": ["text"] * 1000}), path)
    content = bytearray(path.read_bytes())
    content[10:40] = b"\xff" * 30
    path.write_bytes(content)
    assert "damaged" in refuse_rows(path)


@pytest.mark.parametrize("value", [1e308, -1e300, float("inf"), 10**400])
def test_a_reward_whose_square_is_no_number_is_refused(value) -> None:
    with pytest.raises(ValueError, match="a reward must"):
        parse_reward(value)


def test_garbled_lines_are_no_metrics(folder_of_run) -> None:
    folder_of_run.append_metrics({"step": 1, "reward_mean": 0.5})
    with (folder_of_run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "x"}\n\0\0\xff\n[1]\n{"step": {"a": 1}}\n{"step": 2}\n')
    assert [m["step"] for m in folder_of_run.read_metrics()] == [1, 2]


@pytest.fixture
def folder_of_run(tmp_path):
    from agentrl_cli.store.run_folder import RunFolder

    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "x",
            "output_dir": str(tmp_path),
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "t.jsonl"},
        }
    )
    with RunFolder.create_or_resume(config) as run:
        yield run


def test_a_flipped_byte_in_a_checkpoint_is_named(folder_of_run) -> None:
    with folder_of_run.new_checkpoint(1) as path:
        (path / "learner").mkdir()
        (path / "learner" / "optimizer.safetensors").write_bytes(bytes(1000))
    _, saved = folder_of_run.latest_checkpoint()
    check_checksums(saved)
    damaged = saved / "learner" / "optimizer.safetensors"
    damaged.write_bytes(bytes(500) + b"\1" + bytes(499))
    with pytest.raises(StoreError, match=r"learner/optimizer\.safetensors changed"):
        check_checksums(saved)
    (saved / "checksums.json").write_text("{")
    with pytest.raises(StoreError, match="damaged"):
        check_checksums(saved)


def test_an_interrupted_checkpoint_leaves_nothing(tmp_path) -> None:
    with pytest.raises(RuntimeError), checksummed_folder(tmp_path / "c"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "cannot be loaded"),
        ("[1]", "cannot be loaded"),
        ('{"model_type": "no-such"}', "cannot be loaded"),
        ({"auto_map": {"AutoConfig": "evil.C"}, "model_type": "evil"}, "never runs"),
        ({"model_type": "qwen2"}, "cannot be loaded"),
    ],
)
def test_model_folders_that_cannot_be_loaded(tmp_path, config, words) -> None:
    """The last one holds pickled weights; none is unpickled, and no code runs or is asked for."""
    from agentrl_cli.models.pretrained import load_model

    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ModelError, match=words):
        load_model(str(tmp_path), "float32", "cpu")


def test_pipes_are_not_waited_for(tmp_path) -> None:
    from agentrl_cli.config.sft_config import SftDatasetConfig
    from agentrl_cli.models import sft_rows
    from agentrl_cli.models.chat_templates import read_chat_template

    pipe = tmp_path / "p.jsonl"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="pipe"):
        read_chat_template(str(pipe))
    with pytest.raises(DatasetError, match="pipe"):
        sft_rows.load_rows(SftDatasetConfig(path=str(pipe)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": [{"role": "assistant", "content": "\\ud83d"}]}', "surrogate"),
        ('{"messages": ' + "[" * 100_000, "recursion"),
    ],
)
def test_conversations_that_cannot_be_used(tmp_path, line, words) -> None:
    from agentrl_cli.config.sft_config import SftDatasetConfig
    from agentrl_cli.models import sft_rows

    (tmp_path / "t.jsonl").write_text(line)
    with pytest.raises(DatasetError, match=words):
        sft_rows.load_rows(SftDatasetConfig(path=str(tmp_path / "t.jsonl")))


def test_a_file_is_no_folder_of_runs(folder_of_run) -> None:
    from agentrl_cli.store.run_folder import RunFolder

    config = folder_of_run.load_config()
    config = config.model_copy(update={"output_dir": str(folder_of_run.path / "config.yaml")})
    for open_folder in (RunFolder.create_or_resume, RunFolder.for_evaluation):
        with pytest.raises(RunFolderError, match="Type output_dir="):
            open_folder(config)


def test_files_of_a_model_are_looked_at_before_anything_is_written(tmp_path) -> None:
    """Of pickled weights, none, and those cut off; the first is in order."""
    import torch
    from safetensors.torch import save_file

    from agentrl_cli.models.model_files import check_model_files

    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, weights)
    check_model_files(str(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match="SafetensorError"):
        check_model_files(str(tmp_path))
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickled weights are never loaded"):
        check_model_files(str(tmp_path))


def test_a_template_that_raises_is_refused(tmp_path, chat_tokenizer) -> None:
    from agentrl_cli.models.model_files import load_tokenizer_of

    chat_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 400}')
    for text in ("{{ raise_exception('no') }}", "{% if %}", "{{ messages[7].content }}"):
        (tmp_path / "t.jinja").write_text(text)
        with pytest.raises(ModelError, match="does not render"):
            load_tokenizer_of(str(tmp_path), None, str(tmp_path / "t.jinja"))
