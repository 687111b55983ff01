"""What the README promises, as a user types it: the quickstart, its Python, real-world data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl_cli.store.run_folder import RunFolder

ROOT = Path(__file__).parents[3]

#: In the format of GSM8K; made for this test.
#: ``rollout.max_trajectory_age``.
MAX_AGE = 8
ROWS = [
    {
        "question": f"Ann has {n} boxes with {n + 3} pens each and finds {n} pens more. "
        "How many pens does she have?",
        "answer": f"In the boxes are {n} * {n + 3} = <<{n}*{n + 3}={n * (n + 3)}>>{n * (n + 3)} "
        f"pens.\nWith the others she has {n * (n + 3)} + {n} pens.\n#### {n * (n + 4)}",
    }
    for n in range(2, 14)
]


@pytest.mark.openai_agents
@pytest.mark.timeout(1200)
def test_the_quickstart_runs_in_small(
    tmp_path: Path, model_folder: Path, run_python: Callable[..., str]
) -> None:
    """Two steps of a random model: what they teach is for the whole quickstart to show."""
    pytest.importorskip("agents")
    output = run_python(
        *("-m", "agentrl_cli", "train", "--config", "configs/quickstart.yaml"),
        *("train.total_steps=2", "valid_dataset.limit=16"),
        *(f"model.path={model_folder}", f"output_dir={tmp_path}"),
    )
    folder = RunFolder.open(tmp_path / "quickstart" / "t0")
    check_steps(folder, 2)
    assert [folder.read_eval_report(step)["num_tasks"] for step in folder.eval_steps()] == [16, 16]
    for promised in ("before", "after", "agentrl inspect-trajectories", "agentrl eval"):
        assert promised in output
    assert folder.latest_checkpoint() is not None


def check_steps(folder: RunFolder, num_steps: int) -> None:
    """No trajectory failed, none is older than allowed, and what was sampled was trained."""
    metrics = folder.read_metrics()
    assert [line["step"] for line in metrics] == list(range(1, num_steps + 1))
    assert sum(line["failures"] for line in metrics) == 0
    assert max(line["token_age_max"] for line in metrics) <= MAX_AGE
    assert max(line["probe_gap_max"] for line in metrics) < 1e-3
    mismatches = [
        v for line in metrics for k, v in line.items() if k.startswith("prefix_mismatches_")
    ]
    assert mismatches == [0] * (5 * num_steps)


@pytest.mark.slow
@pytest.mark.openai_agents
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", ["quickstart", pytest.param("quickstart-ppo", marks=pytest.mark.long)]
)
def test_quickstart_teaches_the_agent_to_use_its_tool(
    tmp_path: Path, run_python: Callable[..., str], name: str
) -> None:
    pytest.importorskip("agents")
    config = ("--config", f"configs/{name}.yaml", f"output_dir={tmp_path}")
    run_python("-m", "agentrl_cli", "train", *config)
    folder = RunFolder.open(tmp_path / name / "t0")
    steps = folder.eval_steps()
    before, after = (folder.read_eval_report(step) for step in (steps[0], steps[-1]))
    assert before["mean_reward"] <= 0.45
    assert after["mean_reward"] >= 0.95
    assert before["failures"] == after["failures"] == {}
    checkpoint = folder.latest_checkpoint()
    assert checkpoint is not None
    if name == "quickstart":
        check_steps(folder, 15)
        evaluate = ("eval", *config[:2], "--checkpoint", str(checkpoint[1]), "--limit", "64")
        assert "mean reward" in run_python("-m", "agentrl_cli", *evaluate, config[2])
        return
    metrics = folder.read_metrics()
    assert [line["num_updates"] for line in metrics[:3]] == [0, 0, 4]
    # Later all rewards are equal, and nothing is left to explain.
    assert max(line.get("explained_variance", 0.0) for line in metrics) > 0.2
    assert metrics[-1]["value_mean"] == pytest.approx(metrics[-1]["return_mean"], abs=0.1)
    assert (checkpoint[1] / "critic" / "optimizer.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_python_example_of_the_readme_trains(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [example] = [block for block in blocks if "PPOTrainer" in block]
    script = tmp_path / "own_workflow.py"
    script.write_text(
        example.replace("configs/quickstart.yaml", str(ROOT / "configs/quickstart.yaml"))
    )
    output = run_python(str(script), folder=tmp_path)
    assert output.splitlines()[-1] == "trained: runs/quickstart/ask-twice"
    folder = RunFolder.open(tmp_path / "runs" / "quickstart" / "ask-twice")
    assert [line["step"] for line in folder.read_metrics()] == [1, 2, 3]
    [trajectory, *_] = folder.read_trajectories(1)
    first, second = trajectory.interactions
    assert second.parent_id == first.id
    assert second.extends_parent
    assert second.turn_return == trajectory.reward
    assert first.turn_return == pytest.approx(0.9 * trajectory.reward)


@pytest.mark.slow
@pytest.mark.openai_agents
@pytest.mark.timeout(1200)
def test_math_config_runs_on_a_local_file_with_either_agent(
    tmp_path: Path, model_folder: Path, run_python: Callable[..., str]
) -> None:
    """On a random model: what a trained one samples differs between processors."""
    pytest.importorskip("agents")
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))

    def train(builder: str) -> RunFolder:
        run_python(
            *("-m", "agentrl_cli", "train", "--config", "configs/gsm8k-math.yaml"),
            *(f"model.path={model_folder}", "engine.kind=embedded", "model.dtype=float32"),
            *(f"train_dataset.path={data}", f"valid_dataset.path={data}"),
            *("valid_dataset.limit=4", "engine.max_model_len=1024", "gconfig.max_tokens=48"),
            *("gconfig.n_samples=2", "train_dataset.batch_size=4", "train.total_steps=3"),
            *(f"output_dir={tmp_path}", f"trial_name={builder}"),
            f"agent_builder_path=builders.math_agent.{builder}",
            OMP_NUM_THREADS="1",
        )
        return RunFolder.open(tmp_path / "gsm8k-math" / builder)

    # Two at once: most of either is imports, which take one core.
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(train, ("build_math_agent", "build_math_team")))
    for folder in folders:
        assert [line["num_trajectories"] for line in folder.read_metrics()] == [8, 8, 8]
        command = ("inspect-trajectories", str(folder.path), "1", "--step", "3")
        assert "reward" in run_python("-m", "agentrl_cli", *command)


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
def test_the_configuration_of_every_framework_trains(
    name: str, package: str, tmp_path: Path, run_python: Callable[..., str]
) -> None:
    pytest.importorskip(package)
    train = ("-m", "agentrl_cli", "train", "--config", f"configs/{name}.yaml")
    run_python(*train, "train.total_steps=1", "valid_dataset=null", f"output_dir={tmp_path}")
    folder = RunFolder.open(tmp_path / name / "t0")
    check_steps(folder, 1)
    assert folder.read_metrics()[0]["num_trajectories"] == 128
    trajectories = folder.read_trajectories(1)
    assert any(t.num_tool_calls for t in trajectories)
    agents = {t.agent_name for t in trajectories}
    assert agents == ({"async", "blocking"} if name == "plain-calculator" else {None})
