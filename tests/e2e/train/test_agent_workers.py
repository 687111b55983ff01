"""Agents in worker processes, from the command line: a run, and a builder that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[3]
ROWS = [{"question": f"What is {n} plus {n}?", "answer": str(2 * n)} for n in range(3)]

AGENT = """\
import openai

def solve(data):
    client = openai.OpenAI()
    messages, lengths = [], []
    for question in (data["question"], "Are you sure?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(model="tracked", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        lengths.append(len(messages[-1].get("content") or ""))
    print("an agent's own words")
    return float(lengths[-1] % 2)

def build():
    return solve
"""
CONFIG = """\
experiment_name: demo
model: {path: tiny, dtype: float32}
agent_builder_path: agent.build
gconfig: {n_samples: 3, max_tokens: 8}
train_dataset: {path: tasks.jsonl, batch_size: 2}
engine: {kind: embedded, max_model_len: 256}
rollout: {agent_mode: subprocess, num_workers: 2, worker_max_memory_gib: 4}
train: {total_steps: 2, learning_rate: 1.0e-3}
"""


@pytest.mark.slow
def test_a_blocking_agent_is_trained_from_the_command_line(
    tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "tiny").symlink_to(model_folder)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    env = os.environ | {"PYTHONPATH": str(PROJECT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "agentrl_cli", "train", "--config", "c.yaml"],
        cwd=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "a person's own"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    # It has its log, and does not garble the display.
    assert "own words" not in output
    run = tmp_path / "runs" / "demo" / "t0"
    lines = (run / "logs" / "agent-workers.log").read_text().splitlines()
    spoken = {line.partition(" | ")[0] for line in lines if line.endswith("an agent's own words")}
    assert len(spoken) == 2 * 2 * 3, "each trajectory of both steps has a name of its own"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]


@pytest.mark.slow
def test_a_builder_that_fails_in_a_worker_stops_the_command_with_a_message(
    tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "tiny").symlink_to(model_folder)
    (tmp_path / "agent.py").write_text("def build():\n    raise RuntimeError('no weather')\n")
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "tasks.jsonl").write_text(json.dumps(ROWS[0]))
    done = subprocess.run(
        [sys.executable, "-m", "agentrl_cli", "train", "--config", "c.yaml"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "agent_builder_path: the builder raised RuntimeError: no weather" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
