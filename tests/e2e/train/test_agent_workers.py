"""Agents in worker processes, from the command line: a run, and a builder that fails."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

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
ARGUMENTS = (
    *("train", "--config", "experiment.yaml", "train.total_steps=2", "reward_fn_path=null"),
    *("rollout.agent_mode=subprocess", "rollout.subprocess.max_processes=2"),
    "rollout.subprocess.max_memory_gib=4",
)


@pytest.mark.slow
def test_a_blocking_agent_is_trained_from_the_command_line(
    project: Path,
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a person's own")
    (project / "my_agent.py").write_text("def build():\n    raise RuntimeError('no weather')\n")
    output = finish(agentrl(*ARGUMENTS), 2)
    assert "agent_builder_path: the builder raised RuntimeError: no weather" in output
    assert "Traceback" not in output
    assert not (project / "runs").exists()

    (project / "my_agent.py").write_text(AGENT)
    # An agent has its log, and does not garble the display.
    assert "own words" not in finish(agentrl(*ARGUMENTS))
    folder = RunFolder.open(project / "runs" / "small" / "t0")
    lines = folder.log_path("agent-workers").read_text().splitlines()
    spoken = {line.partition(" | ")[0] for line in lines if line.endswith("an agent's own words")}
    assert len(spoken) == 2 * 4 * 4, "each trajectory of both steps has a name of its own"
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
