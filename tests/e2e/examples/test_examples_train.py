"""Each example's README can be followed: its commands, as they stand there, in small."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/README.md"))
NEEDED = {"calculator_tools": "agents", "guess_number": "anthropic", "search": "langgraph"}
#: Two steps of a random model: what is learned is shown in docs/results/real-models.md.
SMALL = {
    "sft": ["dataset.limit=4"],
    "train": [
        *("model.dtype=float32", "engine.kind=embedded", "engine.max_model_len=1024"),
        *("train.total_steps=2", "train.eval_every_steps=2", "train_dataset.batch_size=2"),
        *("gconfig.n_samples=2", "valid_dataset.limit=4"),
    ],
    "inspect-trajectories": [],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_readme_can_be_followed(
    tmp_path: Path, model_folder: Path, run_python: Callable[..., str], name: str
) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name])
    # What the commands write lands beside the link, not in the repository.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line.startswith("    agentrl ") and "-gpu" not in line]
    for line in commands:
        command = shlex.split(line, comments=True)[1:]
        small = SMALL[command[0]]
        if small and "model.path=" not in line:
            small = [*small, f"model.path={model_folder}"]
        output = run_python(
            *("-m", "agentrl_cli"), *command, *small, folder=tmp_path, CUDA_VISIBLE_DEVICES=""
        )
    assert command[0] == "inspect-trajectories"
    assert "the first one:  agentrl inspect-trajectories" in output
    folder = RunFolder.open(tmp_path / command[1])
    metrics = folder.read_metrics()
    assert [line["surroundings_failures"] for line in metrics] == [0, 0]
    trajectories = [t for step in (1, 2) for t in folder.read_trajectories(step)]
    assert len(trajectories) == 8
    assert all(t.reward is not None for t in trajectories)
    assert folder.eval_steps() == [0, 2]
