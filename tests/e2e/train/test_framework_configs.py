"""The configuration of every framework trains by the command, without a prefix mismatch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "package"),
    [
        pytest.param("openai-agents-responses", "agents", marks=pytest.mark.openai_agents),
        pytest.param("camel-calculator", "camel", marks=pytest.mark.camel),
        pytest.param("langgraph-calculator", "langgraph", marks=pytest.mark.langgraph),
        ("plain-calculator", "openai"),
    ],
)
def test_configuration_trains(name: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "agentrl_cli", "train", "--config", f"configs/{name}.yaml"),
            *("train.total_steps=1", "valid_dataset=null", f"output_dir={tmp_path}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert result.returncode == 0, result.stdout
    folder = RunFolder.open(tmp_path / name / "t0")
    [metrics] = folder.read_metrics()
    assert (metrics["num_trajectories"], metrics["failures"]) == (128, 0)
    mismatches = [v for k, v in metrics.items() if k.startswith("prefix_mismatches_")]
    assert mismatches == [0] * 5
    trajectories = folder.read_trajectories(1)
    assert any(t.num_tool_calls for t in trajectories)
    agents = {t.agent_name for t in trajectories}
    assert agents == ({"async", "blocking"} if name == "plain-calculator" else {None})
