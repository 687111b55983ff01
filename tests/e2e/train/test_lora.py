"""An adapter by the command line: trained, gone on with, evaluated."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytest.importorskip("peft", reason="needs peft (extra lora)")

LORA = ("model.lora.rank=4", "model.lora.alpha=8.0")


def run(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, f"{output}\n{errors}"
    return output


@pytest.mark.slow
def test_an_adapter_is_trained_resumed_and_evaluated(
    project: Path, agentrl: Callable[..., subprocess.Popen[str]]
) -> None:
    train = ("train", "--config", "experiment.yaml", *LORA, "train.save_every_steps=1")
    run(agentrl(*train, "train.total_steps=2"))
    checkpoints = project / "runs" / "small" / "t0" / "checkpoints"
    run(agentrl(*train, "train.total_steps=3"))
    folders = [checkpoints / f"step-{step:06d}" for step in (1, 2, 3)]
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(len(adapter) == 28 for adapter in adapters)
    for before, after in itertools.pairwise(adapters):
        assert any((before[name] != after[name]).any() for name in before)
    output = run(
        agentrl("eval", "--config", "experiment.yaml", *LORA, "--checkpoint", str(folders[2]))
    )
    assert "mean reward" in output
