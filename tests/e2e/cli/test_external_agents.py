"""docs/external-agents.md as its reader follows it: its curl lines, against a real run."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.store.run_folder import RunFolder

PROJECT = Path(__file__).parents[3]
PAGE = (PROJECT / "docs" / "external-agents.md").read_text()
CONFIG = """\
experiment_name: outside
model: {path: tiny, dtype: float32}
gconfig: {n_samples: 2, max_tokens: 8}
train_dataset: {path: tasks.jsonl, batch_size: 2}
rollout: {agent_mode: external, max_concurrent: 4}
engine: {kind: embedded, max_model_len: 512}
train: {total_steps: 1, learning_rate: 1.0e-3}
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl"),
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, tiny: Path) -> Path:
    """A user's folder."""
    (tmp_path / "outside.yaml").write_text(CONFIG)
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(1, 4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def follow_page(printed: str, reward: float) -> list[str]:
    """Types every bash block of the page, once; what each ``curl`` said."""
    exports = re.findall(r"^  (export \w+=\S+)$", printed, re.MULTILINE)
    assert [e.split("=")[0] for e in exports[:2]] == [
        "export AGENTRL_URL",
        "export AGENTRL_API_KEY",
    ]
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    script = "\n".join(["set -e", *exports[:2], *blocks])
    assert script.count("REWARD=1\n") == 1
    script = script.replace("REWARD=1\n", f"REWARD={reward}\n").replace(
        "curl -sS", "curl -sS --max-time 60 --write-out '\\n'"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()


def test_a_training_step_is_made_of_what_the_pages_program_did(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    command = start("train", "--config", "outside.yaml")
    command.wait_for("curl -X POST")
    for reward in (1, 0, 1, 0):
        chat, message, state, given, ended = map(json.loads, follow_page(command.text, reward))
        assert chat["object"] == "chat.completion"
        assert message["type"] == "message"
        assert [i["id"] for i in state["interactions"]] == [chat["id"], message["id"]]
        assert (given["state"], ended["state"]) == ("open", "ended")
    assert command.end() == 0, command.text
    key = re.search(r"AGENTRL_API_KEY=(\S+)", command.text)
    assert key is not None
    assert command.text.count(key[1]) == 1
    folder = RunFolder.open(tmp_path / "runs" / "outside" / "t0")
    trajectories = folder.read_trajectories(1)
    assert [t.reward for t in trajectories] == [1.0, 0.0, 1.0, 0.0]
    assert [t.num_turns for t in trajectories] == [2, 2, 2, 2]
    assert [t.failure for t in trajectories] == [None] * 4
    assert {t.final_answer for t in trajectories} == {"4"}
    [metrics] = folder.read_metrics()
    assert metrics["reward_mean"] == 0.5
    assert metrics["grad_norm"] > 0
    assert folder.latest_checkpoint() is not None
    written = [p for p in (tmp_path / "runs").rglob("*") if p.is_file()]
    assert not [p for p in written if key[1].encode() in p.read_bytes()]


def test_serving_online_stores_what_programs_did(
    start: Callable[..., Any], finish: Callable[..., str], tmp_path: Path
) -> None:
    command = start("serve", "--online", "--config", "outside.yaml")
    command.wait_for("curl -X POST")
    follow_page(command.text, 1)
    follow_page(command.text, 0.5)
    command.signal(signal.SIGINT, at="reward 0.500")
    assert command.end() == 0, command.text
    assert "stopped serving" in command.text
    finish("inspect-trajectories", "runs/outside/t0", "--evals", "all", "--json")
    folder = RunFolder.open(tmp_path / "runs" / "outside" / "t0")
    [(step, label)] = folder.list_evals()
    trajectories, report = folder.read_eval(step, label=label)
    assert [t.reward for t in trajectories] == [1.0, 0.5]
    assert report["num_trajectories"] == 2
    assert folder.trajectory_steps() == [], "an online run is no material for agentrl train"


@pytest.mark.parametrize("options", [[], ["--online"]], ids=["serve", "online"])
def test_other_machines_are_let_in_by_a_chosen_key_alone(
    refused: Callable[..., str], options: list[str]
) -> None:
    arguments = ("serve", *options, "--config", "outside.yaml", "--host", "0.0.0.0")
    text = refused(*arguments)
    assert "--host 0.0.0.0 lets other machines in" in text
    assert "export AGENTRL_API_KEY=$(openssl rand -hex 24)" in text
    assert "has 5 characters" in refused(*arguments, "--api-key", "short")
