"""One small run through its life: stopped by Ctrl-C, gone on with, measured, looked at."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]

AGENT = """\
def build(client, model):
    async def run(data):
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model=model, messages=messages)
        return float(len(reply.choices[0].message.content or "") % 2)
    return run
"""
CONFIG = """\
experiment_name: demo
model: {path: tiny, dtype: float32}
agent_builder_path: agent.py:build
gconfig: {n_samples: 4, max_tokens: 8}
train_dataset: {path: tasks.jsonl, batch_size: 2}
valid_dataset: {path: tasks.jsonl}
engine: {kind: embedded, max_model_len: 128}
train: {total_steps: 5000, learning_rate: 1.0e-3}
"""


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A user's folder, with a random model of two layers in it."""
    shutil.copytree(model_folder, tmp_path / "tiny")
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "c.yaml").write_text(CONFIG)
    rows = [json.dumps({"question": f"What is 1 plus {n}?"}) for n in range(4)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows))
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    env = os.environ | {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl_cli", *arguments],
        cwd=folder,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(folder: Path, *arguments: str) -> str:
    process = start(folder, *arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def interrupt(process: subprocess.Popen[str], at: str, number: int, seconds: float = 0.0) -> str:
    """What a process prints that is sent a signal ``seconds`` after the line ``at``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(at):
            time.sleep(seconds)
            process.send_signal(number)
    output = "".join(lines)
    assert process.wait(60) == 0, output
    process.stdout.close()
    return output


@pytest.mark.slow
def test_a_run_is_stopped_gone_on_with_measured_and_looked_at(folder: Path) -> None:
    process = start(folder, "train", "--config", "c.yaml")
    output = interrupt(process, "step 2/", signal.SIGINT)
    assert "stopping: a step in progress is finished and saved" in output
    assert "the same command resumes from here" in output

    run = folder / "runs" / "demo" / "t0"
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Whatever step was in progress: it was finished, and it is the one that was saved.
    assert steps == list(range(1, len(steps) + 1))
    assert saved == [f"step-{len(steps):06d}"]

    total = len(steps) + 1
    output = finish(folder, "train", "--config", "c.yaml", f"train.total_steps={total}")
    assert f"resuming after step {total - 1}" in output
    assert f"step {total}/{total}" in output
    assert "mean reward" in output
    checkpoint = f"runs/demo/t0/checkpoints/step-{total:06d}"
    assert f"agentrl eval --config c.yaml --checkpoint {checkpoint}" in output

    output = finish(
        folder, "eval", "--config", "c.yaml", "--checkpoint", checkpoint, "--limit", "2"
    )
    assert "2 / 2" in output
    listed = json.loads(finish(folder, "inspect-trajectories", "runs/demo/t0", "--json"))
    assert [s["step"] for s in listed["steps"]][:total] == list(range(1, total + 1))
    assert any(e["label"] for e in listed["evals"])


@pytest.mark.slow
def test_a_warm_start_is_stopped_at_once_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder / "cache"
    monkeypatch.setenv("AGENTRL_CACHE", str(cache))
    arguments = ("train", "--config", "c.yaml", "model.path=builtin:calculator")
    process = start(folder, *arguments, "engine.max_model_len=512")
    # A second later an update is under way.
    output = interrupt(process, "warm start (0/", signal.SIGTERM, seconds=1.0)
    assert "stopping: a step in progress" in output
    assert "the same command resumes from here" in output
    # A warm start that went on to its end would have left the model.
    assert [p.suffix for p in cache.iterdir()] == [".lock"]
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(folder: Path) -> None:
    process = start(folder, "train", "--config", "c.yaml")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(("step 1/", "stopping:")):
            process.send_signal(signal.SIGINT)
    code = process.wait(60)
    process.stdout.close()
    output = "".join(lines)
    assert "Traceback" not in output
    # The second may come when the step is already saved and the run has ended by itself.
    assert code == 130 or "the same command resumes from here" in output, output
