"""One small run through its life: stopped by Ctrl-C, gone on with, measured, looked at."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TRAIN = ("train", "--config", "c.yaml")
pytestmark = pytest.mark.slow


def test_a_run_is_stopped_gone_on_with_measured_and_looked_at(
    folder: Path, start: Callable[..., Any], finish: Callable[..., str]
) -> None:
    process = start(*TRAIN)
    process.signal(signal.SIGINT, at="\nstep 2/")
    assert process.end() == 130, process.text
    assert "stopping: a step in progress is finished and saved" in process.text
    assert "the same command resumes from here" in process.text

    run = folder / "runs" / "demo" / "t0"
    saved = [p.name for p in (run / "checkpoints").iterdir()]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Whatever step was in progress: it was finished, and it is the one that was saved.
    assert steps == list(range(1, len(steps) + 1))
    assert saved == [f"step-{len(steps):06d}"], process.text

    total = len(steps) + 1
    output = finish(*TRAIN, f"train.total_steps={total}")
    assert f"resuming after step {total - 1}" in output
    assert f"step {total}/{total}" in output
    assert "mean reward" in output
    checkpoint = f"runs/demo/t0/checkpoints/step-{total:06d}"
    measure = f"eval --config c.yaml --checkpoint {checkpoint}"
    assert f"agentrl {measure}" in output

    assert "2 / 2" in finish(*measure.split(), "--limit", "2")
    printed = finish(*measure.split(), "--limit", "2", "--json", "valid_dataset=null")
    said, brace, report = printed.partition("{\n")
    assert "measures on the rows of train_dataset" in said
    assert json.loads(brace + report)["num_trajectories"] == 2
    listed = json.loads(finish("inspect-trajectories", "runs/demo/t0", "--json"))
    assert [s["step"] for s in listed["steps"]][:total] == list(range(1, total + 1))
    assert any(e["label"] for e in listed["evals"])

    named = [*measure.split(), "--limit", "1", "--name", "candidate"]
    for name in ("candidate", "candidate-2"):
        assert f"--evals {name}\n" in finish(*named)
        chosen = ("--evals", name, "--json")
        listed = json.loads(finish("inspect-trajectories", "runs/demo/t0", *chosen))
        assert len(listed["trajectories"]) == 1


def test_nothing_that_a_run_shows_steers_the_terminal(
    folder: Path, finish: Callable[..., str]
) -> None:
    """Rows and exceptions hold what a terminal obeys, and what no UTF-8 holds."""
    (folder / "agent.py").write_text(
        """\
def build(client, model):
    async def run(data):
        messages = [{"role": "user", "content": data["question"]}]
        reply = await client.chat.completions.create(model=model, messages=messages)
        if data["question"].startswith("ask"):
            messages[0]["content"] = "half \\ud83d"
            await client.chat.completions.create(model=model, messages=messages)
        if data["question"].startswith("raise"):
            raise ValueError("\\x1b]0;raised\\x07 half \\ud83d")
        return 0.0
    return run
"""
    )
    rows = [{"question": f"{word} \x1b]0;asked\x07"} for word in ("ask", "raise", "pass", "pass")]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shown = [
        finish(*TRAIN, "train.total_steps=1", "train_dataset.batch_size=4"),
        finish("inspect-trajectories", "runs/demo/t0"),
        finish("inspect-trajectories", "runs/demo/t0", "--step", "1", "--failure", "any"),
        finish("eval", "--config", "c.yaml"),
        *(path.read_text() for path in (folder / "runs/demo/t0/logs").rglob("*.log")),
    ]
    text = "\n".join(shown)
    assert "the model begins with a mean reward of 0.000" in shown[0]
    assert "failed: 8 surroundings" in shown[0]
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "raised" in text
    assert "asked" in text


def test_a_warm_start_is_stopped_at_once_and_leaves_nothing(
    folder: Path, start: Callable[..., Any]
) -> None:
    cache = folder / "cache"
    settings = ("model.path=builtin:calculator", "engine.max_model_len=512")
    process = start(*TRAIN, *settings, AGENTRL_CACHE=str(cache))
    process.wait_for("warm start (0/")
    # Until an update is under way.
    time.sleep(1.0)
    process.signal(signal.SIGTERM, at="warm start (0/")
    assert process.end() == 143, process.text
    assert "stopping: a step in progress" in process.text
    assert "the same command resumes from here" in process.text
    # A warm start that went on to its end would have left the model.
    assert [p.suffix for p in cache.iterdir()] == [".lock"]
    assert not (folder / "runs").exists()


def test_a_second_ctrl_c_stops_at_once(folder: Path, start: Callable[..., Any]) -> None:
    process = start(*TRAIN)
    process.signal(signal.SIGINT, at="\nstep 1/")
    process.signal(signal.SIGINT, at="\nstopping:")
    # Also where the second comes when the step is already saved and the run has ended by itself.
    assert process.end() == 130
