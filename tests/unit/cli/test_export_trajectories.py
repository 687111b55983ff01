"""``agentrl export-trajectories`` as it is typed: what it prints, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl_cli.cli.app import app
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import UserInputError
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder


def write_run(config: ExperimentConfig) -> None:
    question = {"role": "user", "content": "1+1"}
    call = Interaction(
        id="c", messages=(question,), reply={"role": "assistant", "content": "2"}, started_at=1.0
    )
    trajectory = Trajectory(
        id="000001.000/0", group_id="000001.000", task_id="0", interactions=(call,), reward=1.0
    )
    with RunFolder.create_or_resume(config) as folder:
        folder.write_trajectories(1, [trajectory])


def run(*arguments: str | Path) -> str:
    """What the command prints; raises what it raises."""
    words = ["export-trajectories", *map(str, arguments)]
    return CliRunner().invoke(app, words, catch_exceptions=False).output


def test_formats_and_what_does_not_fit_them(
    run_config: Callable[..., ExperimentConfig], tmp_path: Path
) -> None:
    write_run(run_config())
    folder, to = tmp_path / "runs" / "exp" / "t0", tmp_path / "a.jsonl"
    printed = run(folder, "--format", "jsonl", "--steps", "1", "--to", to)
    assert printed == f"{to}: 1 trajectory\n"
    assert json.loads(to.read_text())["reward"] == 1.0
    run(folder, "--format", "atif", "--tokens", "--to", tmp_path / "atif")
    [document] = (tmp_path / "atif").rglob("*.json")
    assert json.loads(document.read_text())["steps"][1]["message"] == "2"
    printed = run(folder, "--to", tmp_path / "b c.jsonl")
    assert "1 conversation of 1 task, from 1 trajectory\n" in printed
    assert printed.endswith(f"dataset.path='{tmp_path}/b c.jsonl'\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--format", "atif", "--to", "{}/file"), "Name a folder"),
        (("--format", "jsonl", "--to", "{}"), "Name a file in it"),
        (("--tokens", "--to", "{}/b.jsonl"), "type --format jsonl"),
    ],
)
def test_what_does_not_fit_a_format_is_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserInputError, match=message):
        run("none", *(argument.format(tmp_path) for argument in arguments))
