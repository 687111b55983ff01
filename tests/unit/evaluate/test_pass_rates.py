"""How often tasks are solved, written by an evaluation and read as a dataset."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl_cli.config.experiment import DatasetConfig
from agentrl_cli.errors import DatasetError
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.evaluate.eval_run import save_pass_rates
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import load_rows
from agentrl_cli.store.run_folder import RunFolder

REWARDS = {
    0: [1.0, 1.0, 1.0, 1.0],
    1: [0.5, 1.0, 0.0, None],
    10: [0.5, 0.5, 0.5, 0.5],
    2: [None, None, None, None],
}
TRAJECTORIES = [
    Trajectory(
        id=f"{task}/{index}",
        group_id=str(task),
        task_id=str(task),
        task={"question": f"q{task}"},
        reward=reward,
    )
    for task, rewards in REWARDS.items()
    for index, reward in enumerate(rewards)
]


def test_a_report_counts_what_is_solved_always_and_sometimes() -> None:
    report = build_report(TRAJECTORIES)
    assert (report.num_tasks, report.num_always_passed, report.num_sometimes_passed) == (4, 1, 1)


def test_saved_tasks_are_a_dataset_to_choose_from(run_config, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with RunFolder.create_or_resume(run_config()) as folder:
        folder.write_eval(0, TRAJECTORIES, {}, label="base")
        assert save_pass_rates(folder, "base", path) == 3

    def choose(**bounds: float) -> list[str]:
        rows = load_rows(DatasetConfig(path=str(path), **bounds), "train_dataset")
        return [row["question"] for row in rows]

    assert choose() == ["q0", "q1", "q10"], "in the order of the dataset"
    [q1] = load_rows(
        DatasetConfig(path=str(path), min_pass_rate=0.1, max_pass_rate=0.9), "train_dataset"
    )
    assert q1 == {"question": "q1", "pass_rate": pytest.approx(1 / 3), "mean_reward": 0.5}
    assert choose(max_pass_rate=0.9) == ["q1", "q10"]
    assert choose(min_pass_rate=0.1, limit=1) == ["q0"], "the limit is of those that are chosen"
    with pytest.raises(DatasetError, match=r"none of 3 rows .* 0\.5 to 0\.9; they have 0 to 1$"):
        choose(min_pass_rate=0.5, max_pass_rate=0.9)


def test_rows_without_a_pass_rate_say_how_to_measure_it(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": "q", "pass_rate": 0.5}\n{"question": "r"}\n')
    with pytest.raises(DatasetError, match=r"row 2 has no pass_rate .*--save-tasks tasks\.jsonl"):
        load_rows(DatasetConfig(path=str(path), min_pass_rate=0.1), "train_dataset")
    with pytest.raises(ValueError, match="the other way round"):
        DatasetConfig(path="x", min_pass_rate=0.9, max_pass_rate=0.1)
