"""From what a model can do to what it is trained on: pass rates, and its own best conversations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

#: Passes always, sometimes or never, whatever the model says.
AGENT = """\
import collections
import itertools

attempts = collections.defaultdict(itertools.count)


def build(client, model):
    async def run(data):
        messages = [{"role": "user", "content": data["question"]}]
        await client.chat.completions.create(model=model, messages=messages)
        number = next(attempts[data["question"]])
        return {"always": 1.0, "never": 0.0}.get(data["question"], float(number % 2))
    return run
"""
CONFIG = """\
experiment_name: demo
model: {path: brief, dtype: float32}
agent_builder_path: agent.py:build
gconfig: {n_samples: 4, max_tokens: 100}
train_dataset: {path: tasks.jsonl, batch_size: 1}
engine: {kind: embedded, max_model_len: 256}
train: {total_steps: 1, learning_rate: 1.0e-3}
"""
SFT = """\
output_path: warm
model: {path: brief}
dataset: {path: best.jsonl}
train: {device: cpu}
"""


@pytest.mark.slow
def test_tasks_are_chosen_by_pass_rate_and_the_best_conversations_are_trained_on(
    tmp_path: Path, brief_model: Path, finish: Callable[..., str], refused: Callable[..., str]
) -> None:
    assert brief_model == tmp_path / "brief"
    for name, text in {"agent.py": AGENT, "c.yaml": CONFIG, "sft.yaml": SFT}.items():
        (tmp_path / name).write_text(text)
    questions = ("always", "one", "never", "two")
    rows = "\n".join(json.dumps({"question": question}) for question in questions)
    (tmp_path / "tasks.jsonl").write_text(rows)

    measure = ("eval", "--config", "c.yaml", "eval_gconfig.n_samples=4", "--save-tasks")
    assert "Type --save-tasks some/tasks.jsonl" in refused(*measure, "some/rated.json")
    printed = finish(*measure, "rated.jsonl")
    assert "always 1, sometimes 2, never 1" in printed
    assert "4 tasks with pass rates:  train_dataset.path=rated.jsonl" in printed
    rated = [json.loads(line) for line in (tmp_path / "rated.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rated] == list(questions)
    assert [row["pass_rate"] for row in rated] == [1.0, 0.5, 0.0, 0.5]

    chosen = ("train_dataset.path=rated.jsonl", "train_dataset.min_pass_rate=0.1")
    finish("train", "--config", "c.yaml", *chosen, "train_dataset.max_pass_rate=0.9")
    listed = finish("inspect-trajectories", "runs/demo/t0", "--step", "1", "--json")
    found = json.loads(listed)["trajectories"]
    assert {row["question"] for row in found} < {"one", "two"}

    export = ("export-trajectories", "runs/demo/t0", "--format", "sft", "--min-reward", "1")
    assert "Did you mean" in refused("export-trajectories", "runs/demo/t9", "--to", "x.jsonl")
    assert "Name a file in it" in refused(*export, "--to", "runs")
    printed = finish(*export, "--evals", "all", "--max-per-task", "1", "--to", "best.jsonl")
    assert printed.startswith("best.jsonl: 3 conversations of 3 tasks, from 16 trajectories")
    finish("sft", "--config", "sft.yaml")
    assert (tmp_path / "warm" / "config.json").is_file()
