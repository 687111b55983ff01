"""A folder as a user has it: a model, an agent, a reward, a dataset and a YAML file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl_cli.records import Trajectory
from benchmarks import kills_and_stops
from tests.e2e.forked_commands import ForkedCommand, command_environment

AGENT = '''
async def answer(data, client):
    """Asks once, and then once more with the reply in the history."""
    messages = [{"role": "user", "content": data["question"]}]
    for _ in range(data.get("num_turns", 1)):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        message = reply.choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
    return message.content


def build():
    return answer


def count_vowels(completions, **kwargs):
    return sum(letter in "aeiou" for letter in completions) / max(len(completions), 1)
'''


@pytest.fixture
def project(tmp_path: Path, model_folder: Path) -> Path:
    """The user's folder; ``experiment.yaml`` trains the tiny model on ten questions."""
    (tmp_path / "my_agent.py").write_text(AGENT)
    rows = [{"question": f"Say {n}.", "num_turns": 1 + n % 2} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "experiment_name": "small",
        "model": {"path": str(model_folder), "dtype": "float32"},
        "agent_builder_path": "my_agent.build",
        "reward_fn_path": "my_agent.count_vowels",
        "gconfig": {"n_samples": 4, "max_tokens": 8},
        "train_dataset": {"path": "rows.jsonl", "batch_size": 4},
        "engine": {"kind": "embedded", "max_model_len": 256, "max_num_seqs": 16},
        "rollout": {"max_concurrent": 16, "max_staleness": 1, "timeout_seconds": 60},
        "train": {"total_steps": 3, "learning_rate": 1e-3},
    }
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def agentrl(project: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``agentrl ARGS`` in the user's folder, as a process of its own."""

    def start(*words: str) -> subprocess.Popen[str]:
        return ForkedCommand(
            list(words),
            cwd=project,
            env=os.environ | command_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return start


@pytest.fixture
def start_module(project: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts ``python -m MODULE ARGS`` there."""

    def start(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=project,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


@pytest.fixture
def finish() -> Callable[..., str]:
    """Waits for the end of a command, which must have that exit code; what it said."""

    def wait(process: subprocess.Popen[str], code: int = 0) -> str:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == code, output
        return output

    return wait


@pytest.fixture
def wait_until() -> Callable[..., Any]:
    """Waits, while a command runs, until ``condition`` gives something, which is returned."""

    def wait(process: subprocess.Popen[str], condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 240
        while not (found := condition()):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return found

    return wait


@pytest.fixture
def read_every_task_once() -> Callable[[Path, int], list[list[Trajectory]]]:
    """The trajectories of each step of a run folder, which has so many steps: of every step those
    of its tasks, once each, and a checkpoint of the last."""
    return partial(kills_and_stops.read_every_task_once, batch_size=4, num_samples=4)
