"""Which alarms rang at which step, in tables, lines and JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.inspector.alarms_view import format_alarms, format_ranges
from agentrl_cli.inspector.show import inspect_run
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([1, 2], "1-2"), ([1, 3, 4, 5, 9], "1, 3-5, 9")],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


def test_one_line_an_alarm_in_the_order_in_which_they_rang() -> None:
    alarms = {7: ["truncated"], 3: ["logprob_gap"], 4: ["logprob_gap", "truncated"]}
    assert format_alarms(alarms) == [
        "alarm logprob_gap rang in steps 3-4",
        "alarm truncated rang in steps 4, 7",
    ]
    assert format_alarms({}) == []


@pytest.fixture
def run(tmp_path: Path):
    config = ExperimentConfig.model_validate(
        {
            "experiment_name": "e",
            "output_dir": str(tmp_path),
            "model": {"path": "m"},
            "agent_builder_path": "a.b",
            "train_dataset": {"path": "d"},
        }
    )
    with RunFolder.create_or_resume(config) as folder:
        for step in (1, 2, 3):
            folder.write_trajectories(step, [Trajectory(id="0/0", group_id="0", task_id="0")])
            flag = float(step > 1)
            folder.append_metrics({"step": step, "alarm_truncated": flag, "alarm_kl_of_update": 0})
        yield folder


def show(folder: RunFolder) -> str:
    from agentrl_cli.inspector.query import TrajectoryQuery

    console = Console(file=io.StringIO(), width=200, color_system=None)
    inspect_run(folder.path, None, TrajectoryQuery(), console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_of_steps_names_those_that_rang(run: RunFolder) -> None:
    text = show(run)
    rows = {line.split()[1]: line for line in text.splitlines() if line.strip().startswith("step")}
    assert "truncated" not in rows["1"]
    assert rows["2"].rstrip().endswith("truncated")
    assert rows["3"].rstrip().endswith("truncated")
    assert "kl_of_update" not in text
    assert "alarm truncated rang in steps 2-3" in text


def test_a_run_without_alarms_has_no_column_for_them(run: RunFolder) -> None:
    run.truncate_metrics(1)
    text = show(run)
    assert "alarms" not in text.splitlines()[0]
    assert " rang in step" not in text


def test_as_json(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl_cli.inspector.query import TrajectoryQuery

    inspect_run(run.path, None, TrajectoryQuery(), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert [step["alarms"] for step in data["steps"]] == [[], ["truncated"], ["truncated"]]
    assert data["micro_batches"] == []


def test_saved_micro_batches_are_named_with_the_command(run: RunFolder, capsys) -> None:
    import numpy as np

    from agentrl_cli.inspector.query import TrajectoryQuery

    path = run.write_micro_batch(3, {"step": 3, "what": "w"}, {"input_ids": np.zeros(1)})
    assert f"not finite in step 3:  agentrl inspect-micro-batch {path}" in show(run)
    inspect_run(run.path, None, TrajectoryQuery(), as_json=True)
    [found] = json.loads(capsys.readouterr().out)["micro_batches"]
    assert found == {"step": 3, "path": str(path)}
