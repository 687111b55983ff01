"""``agentrl export`` as a person types it; what it writes is tested in tests/integration/launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store.run_folder import RunFolder

PROJECT = Path(__file__).parents[3]


def export(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentrl_cli", "export", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose checkpoints hold files of a model, and two of which were evaluated."""
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "exp",
            "output_dir": str(tmp_path / "runs"),
            "model": {"path": "Qwen/Qwen2.5-0.5B-Instruct"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "tasks.jsonl"},
        }
    )
    with RunFolder.create_or_resume(config) as folder:
        for step, reward in ((10, 0.75), (20, 0.5)):
            folder.write_eval(step, [], {"mean_reward": reward})
            with folder.new_checkpoint(step) as path:
                (path / "config.json").write_text("{}")
                (path / "model.safetensors").write_bytes(b"w" * step)
    return folder


def test_it_says_what_it_wrote(run: RunFolder, tmp_path: Path) -> None:
    done = export("runs/exp/t0", "--best", "--to", "model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model of step 10 (mean_reward 0.75): model (")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == 10
    card = (tmp_path / "model" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    again = export("runs/exp/t0", "--to", "model", cwd=tmp_path)
    assert again.returncode == 2
    assert "a folder of that name exists" in again.stderr
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/exp/t0", "--to", "m", "--best", "--step", "10"], "give one of them"),
        (["runs/exp/t0", "--to", "m", "--step", "30"], "those of steps 10, 20"),
        (["runs/exp/t9", "--to", "m"], "Did you mean"),
        (["runs/exp/t0"], "--to"),
    ],
)
def test_wrong_input_is_refused(
    run: RunFolder, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = export(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "m").exists()


def test_help_says_what_each_option_takes(tmp_path: Path) -> None:
    done = export("--help", cwd=tmp_path)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for phrase in ("--step N", "--best", "--last", "--merge", "--to DIR", "transformers and vLLM"):
        assert phrase in text
