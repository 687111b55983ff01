"""PPOTrainer and an evaluation from Python, which start and end their own vLLM servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl_cli import PPOTrainer
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.launch.completion_sources import EngineSource
from agentrl_cli.launch.local_run import run_evaluation
from agentrl_cli.launch.run_resolution import resolve_run_here
from agentrl_cli.launch.trainer import run_trainer
from agentrl_cli.log import SilentObserver
from agentrl_cli.store.run_folder import RunFolder

AGENT = """
async def answer(data, client):
    message = {"role": "user", "content": data["question"]}
    reply = await client.chat.completions.create(model="policy", messages=[message])
    return float(len(reply.choices[0].message.content) % 2)


def build():
    return answer
"""


@pytest.fixture
def config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tied_folder: Path,
    make_vllm_config: Callable[..., ExperimentConfig],
) -> ExperimentConfig:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [json.dumps({"question": f"Say {n}."}) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    # Tied, so that the servers for training start with a head of their own, and without weights.
    return make_vllm_config(
        tied_folder,
        agent_builder_path="agent.py:build",
        train_dataset={"path": "rows.jsonl", "batch_size": 2},
        gconfig={"n_samples": 4, "max_tokens": 8},
        train={"total_steps": 2, "learning_rate": 1e-3},
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_from_python_and_an_evaluation_of_its_checkpoint(
    config: ExperimentConfig,
) -> None:
    before = set(psutil.Process().children(recursive=True))
    trainer = PPOTrainer(config)
    assert run_trainer(trainer)
    folder = RunFolder.open("runs/vllm-tests/t0")
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert max(line["probe_gap_max"] for line in folder.read_metrics()) < 1e-3
    assert (folder.path / "logs" / "vllm-0.log").is_file()
    [start] = json.loads((folder.path / "manifest.json").read_text())["starts"]
    assert any(name.startswith("vllm") for name in start["versions"])

    latest = folder.latest_checkpoint()
    assert latest is not None
    observer = SilentObserver()
    source = EngineSource(config, resolve_run_here(config, "eval"), observer, latest[1])
    _, report = run_evaluation(config, source, limit=3, observer=observer)
    assert report.failures == {}
    assert report.num_tasks == 3
    assert (folder.path / "logs" / "eval" / "vllm-0.log").is_file()
    left: Any = set(psutil.Process().children(recursive=True)) - before
    assert [p for p in left if "process_reaper.py" in " ".join(p.cmdline())] == []
