"""Agents as their frameworks' documentation writes them, five in one run of ``agentrl train``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.credit import build_sequences
from tests.e2e.test_stock_agents import AGENTS, NUM_TURNS


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("agent_mode", ["inline", "subprocess"])
def test_five_stock_agents_train_side_by_side_without_a_key(
    agentrl: Callable[..., subprocess.Popen[str]],
    finish: Callable[..., str],
    project: Path,
    brief_model: Path,
    agent_mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("agents", "anthropic", "camel", "langchain_openai", "langgraph"):
        pytest.importorskip(name)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, source in AGENTS.items():
        assert "agentrl" not in source
        (project / f"stock_{name}.py").write_text(f"{source}\ndef build():\n    return solve\n")
    (project / "letters.py").write_text(
        "def judge(completions):\n    return ord(completions[-1])\n"
    )
    rows = [{"question": f"task {name}", "agent_name": name} for name in AGENTS]
    (project / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    paths = {name: {"agent_builder_path": f"stock_{name}.build"} for name in AGENTS}
    output = finish(
        agentrl(
            *("train", "--config", "experiment.yaml", "agent_builder_path=null"),
            "reward_fn_path=letters.judge",
            *(f"agents={json.dumps(paths)}", f"rollout.agent_mode={agent_mode}"),
            *("train_dataset.batch_size=5", "gconfig.n_samples=2", "gconfig.max_tokens=200"),
            f"model.path={brief_model}",
            *("train.total_steps=1", "rollout.timeout_seconds=200", "engine.max_model_len=2048"),
        )
    )
    assert "cannot run inline" not in output
    run = RunFolder.open(project / "runs" / "small" / "t0")
    trajectories = run.read_trajectories(1)
    assert sorted(t.agent_name or "" for t in trajectories) == sorted([*AGENTS, *AGENTS])
    for trajectory in trajectories:
        assert trajectory.failure is None, trajectory.failure
        assert trajectory.num_turns == NUM_TURNS
        assert len(build_sequences(trajectory.interactions, "concat")) == 1, trajectory.agent_name
        asked = json.dumps(list(trajectory.interactions[-1].messages))
        own = trajectory.task["question"]
        assert [q for q in (row["question"] for row in rows) if q in asked] == [own]
    [line] = run.read_metrics()
    # Groups in which both ended with the same letter teach nothing.
    assert 0 < line["num_samples"] <= len(trajectories)
