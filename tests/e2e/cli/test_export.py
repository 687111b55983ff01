"""``agentrl export`` as a person types it; what it writes is tested in tests/integration/launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from agentrl_cli.store.run_folder import RunFolder


@pytest.fixture
def run(run_config) -> RunFolder:
    """A run whose checkpoints hold files of a model, and two of which were evaluated."""
    config = run_config(model={"path": "Qwen/Qwen2.5-0.5B-Instruct"})
    with RunFolder.create_or_resume(config) as folder:
        for step, reward in ((10, 0.75), (20, 0.5)):
            folder.write_eval(step, [], {"mean_reward": reward})
            with folder.new_checkpoint(step) as path:
                (path / "config.json").write_text("{}")
                (path / "model.safetensors").write_bytes(b"w" * step)
    return folder


def test_it_says_what_it_wrote(
    run: RunFolder, tmp_path: Path, finish: Callable[..., str], refused: Callable[..., str]
) -> None:
    printed = finish("export", "runs/exp/t0", "--best", "--to", "model")
    assert printed.startswith("model of step 10 (mean_reward 0.75): model (")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size == 10
    card = (tmp_path / "model" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "Qwen/Qwen2.5-0.5B-Instruct"
    text = refused("export", "runs/exp/t0", "--to", "model")
    assert "a folder of that name exists" in text
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
    run: RunFolder,
    tmp_path: Path,
    refused: Callable[..., str],
    arguments: list[str],
    message: str,
) -> None:
    assert message in refused("export", *arguments)
    assert not (tmp_path / "m").exists()
