"""Each example project trains as its README says, in small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/config.yaml"))
NEEDED = {"calculator_tools": "agents", "guess_number": "anthropic", "search": "langgraph"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_two_steps(tmp_path: Path, model_folder: Path, name: str) -> None:
    """With a random model: what is learned is shown in docs/results/real-models.md."""
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "agentrl_cli", "train"),
            *("--config", f"examples/{name}/config.yaml", f"output_dir={tmp_path}"),
            *(f"model.path={model_folder}", "model.dtype=float32", "model.chat_template=null"),
            *("engine.kind=embedded", "engine.max_model_len=1024", "train.total_steps=2"),
            *("train_dataset.batch_size=2", "gconfig.n_samples=2", "valid_dataset.limit=4"),
            "train.eval_every_steps=2",
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout
    [folder] = [RunFolder.open(path) for path in tmp_path.glob("*/*")]
    metrics = folder.read_metrics()
    assert [line["surroundings_failures"] for line in metrics] == [0, 0], done.stdout
    trajectories = [t for step in (1, 2) for t in folder.read_trajectories(step)]
    assert len(trajectories) == 8
    assert all(t.reward is not None for t in trajectories)
    assert folder.eval_steps() == [0, 2]
