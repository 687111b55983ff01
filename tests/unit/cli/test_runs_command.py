"""The list of runs as a terminal, a pipe and a program get it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from agentrl_cli.cli.app import app
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.store.run_folder import RunFolder


def list_runs(*words: str, columns: int = 80) -> Result:
    env = {"COLUMNS": str(columns)}
    return CliRunner().invoke(app, ["runs", *words], env=env, catch_exceptions=False)


@pytest.fixture
def make_run(run_config: Callable[..., ExperimentConfig]) -> Callable[..., Path]:
    def make(experiment: str = "exp", trial: str = "t0", num_steps: int = 0) -> Path:
        config = run_config(experiment_name=experiment, trial_name=trial, train={"total_steps": 99})
        with RunFolder.create_or_resume(config) as folder:
            for step in range(1, num_steps + 1):
                folder.append_metrics({"step": step, "reward_mean": 0.5, "step_seconds": 6000})
            return folder.path

    return make


def test_a_run_is_one_line(make_run: Callable[..., Path]) -> None:
    path = make_run(num_steps=3)
    RunFolder.open(path).write_eval(3, [], {"mean_reward": 0.25})
    title, line, hint = list_runs(str(path.parent.parent)).output.splitlines()
    assert title.split() == ["run", "status", "steps", "reward", "last", "eval", "time", "active"]
    shown = ["exp/t0", "stopped", "3/99", "▅▅▅", "0.500", "0.250", "5", "h", "0", "min"]
    assert line.split()[:10] == shown
    assert line.split()[11:] == ["s", "ago"]
    assert hint == f"the first one:  agentrl inspect-trajectories {path}"


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 30])
def test_lines_fit_and_lose_what_matters_least(make_run: Callable[..., Path], columns: int) -> None:
    for experiment in ("short", "long" * 20 + "-first", "renamed"):
        path = make_run(experiment, "t" * 30 + "-last", 20)
    path.parent.rename(path.parent.with_name("计算器" * 15))
    output = list_runs(str(path.parent.parent), columns=columns).output.splitlines()
    title, *lines = output[:4]
    assert all(cell_len(line) <= columns for line in (title, *lines))
    assert all("-last" in line and "stopped" in line for line in lines)
    names = title.split()
    assert ("active" in names, "steps" in names) == (columns >= 60, columns >= 40)


def test_names_and_damage_cannot_harm_a_terminal(make_run: Callable[..., Path]) -> None:
    runs = make_run().parent.parent
    surrogate = os.fsdecode(b"\xff")
    hostile = runs / f"[red]\x1b[2J\u202e{surrogate}" / "a\nb [/]"
    hostile.mkdir(parents=True)
    (hostile / "config.yaml").write_text("")
    result = list_runs(str(runs))
    assert result.exit_code == 0
    assert not any(c in result.output for c in ("\x1b", "\u202e", surrogate, "a\nb"))
    assert result.output.splitlines()[1].split()[-3:][1:] == ["s", "ago"]
    assert "\\x1b[2J\\u202e\\udcff" in result.output
    assert "train.total_steps is not found in it" in result.output
    data = json.loads(list_runs(str(runs), "--json").output)
    paths = {run["status"]: run["path"] for run in data["runs"]}
    assert paths == {"stopped": str(runs / "exp" / "t0"), "damaged": str(hostile)}


def test_a_run_that_may_be_running_elsewhere_names_the_machine(
    make_run: Callable[..., Path],
) -> None:
    path = make_run()
    (path / "manifest.json").write_text('{"starts": [{"host": {"name": "node7\\u001b[2J"}}]}')
    (path / ".lock").write_text("process 123")
    output = list_runs(str(path)).output
    assert output.splitlines()[1].split()[1] == "unknown"
    assert f"{path}: may be running on node7\\x1b[2J, where it was started last" in output


def test_json_is_strict_and_whole(make_run: Callable[..., Path]) -> None:
    path = make_run()
    RunFolder.open(path).append_metrics({"step": 1, "reward_mean": float("inf")})
    result = list_runs(str(path), "--json", columns=20)
    (run,) = json.loads(result.output, parse_constant=pytest.fail)["runs"]
    assert run.pop("last_activity").endswith("+00:00")
    assert run == {
        "run": "exp/t0",
        "path": str(path),
        "status": "stopped",
        "pid": None,
        "host": None,
        "step": 1,
        "total_steps": 99,
        "last_reward": None,
        "latest_eval": None,
        "seconds": 0.0,
        "problems": [],
    }


def test_where_none_are_it_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ([], [str(tmp_path)]):
        result = list_runs(*words)
        assert result.exit_code == 0
        assert f"no runs in {tmp_path}" in result.output
        assert "agentrl train --config FILE" in result.output
    assert json.loads(list_runs("--json").output) == {"dir": "runs", "runs": []}
