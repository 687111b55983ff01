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


@pytest.mark.slow
def test_an_adapter_is_trained_resumed_and_evaluated(
    project: Path, agentrl: Callable[..., subprocess.Popen[str]], finish: Callable[..., str]
) -> None:
    train = ("train", "--config", "experiment.yaml", *LORA, "train.save_every_steps=1")
    finish(agentrl(*train, "train.total_steps=2"))
    finish(agentrl(*train, "train.total_steps=3"))
    checkpoints = project / "runs" / "small" / "t0" / "checkpoints"
    folders = [checkpoints / f"step-{step:06d}" for step in (1, 2, 3)]
    adapters = [load_file(folder / "adapter_model.safetensors") for folder in folders]
    assert all(len(adapter) == 28 for adapter in adapters)
    for before, after in itertools.pairwise(adapters):
        assert any((before[name] != after[name]).any() for name in before)
    evaluate = ("eval", "--config", "experiment.yaml", *LORA, "--checkpoint", str(folders[2]))
    assert "mean reward" in finish(agentrl(*evaluate))
