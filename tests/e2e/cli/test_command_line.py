"""The command as a person types it: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_cli.config.config_file import load_config
from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store.run_folder import RunFolder

PROJECT = Path(__file__).parents[3]
HEAVY = ("torch", "transformers", "openai", "vllm", "pydantic", "rich", "pyarrow", "yaml")

CONFIG = """\
experiment_name: demo
model: {path: "no/such-model"}
agent_builder_path: agent.py:build
train_dataset: {path: tasks.jsonl}
engine: {kind: embedded}
"""


TRAIN = ("train", "--config", "c.yaml")
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Path:
    """A user's folder: a configuration, an agent, two tasks."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    (tmp_path / "agent.py").write_text(
        "def build():\n    async def run(data): ...\n    return run\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1"}\n{"question": "1+2"}\n')
    return tmp_path


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['agentrl', '--help']\n"
        "from agentrl_cli.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        f"found = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "assert not found, found\n"
        # Seconds say more of the machine; 222 modules take 0.2 of a processor.
        "assert len(sys.modules) < 300, sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in ("train", "eval", "inspect-trajectories", "sft"):
        assert command in done.stdout


def test_version(start: Callable[..., Any]) -> None:
    command = start("--version")
    assert command.end() == 0
    assert command.text.startswith("agentrl 0.")


@pytest.mark.parametrize("arguments", [(), ("train",), ("train", "--confg", "c.yaml")])
def test_usage_mistakes(refused: Run, arguments: tuple[str, ...]) -> None:
    refused(*arguments)


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("inspect", "inspect-traj")])
def test_a_command_that_is_not_there_suggests_the_nearest(
    refused: Run, typed: str, meant: str
) -> None:
    assert f"did you mean '{meant}" in refused(typed)


def test_the_shell_completes_what_is_typed(tmp_path: Path) -> None:
    # The name of the variable is made from the command's.
    (tmp_path / "agentrl").write_text(
        "import sys\nfrom agentrl_cli.cli.app import main\nsys.argv[0] = 'agentrl'\nmain()\n"
    )
    request = {"_AGENTRL_COMPLETE": "complete_bash", "COMP_WORDS": "agentrl ins", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "agentrl"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PROJECT)} | request,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["inspect-trajectories"]


def test_dry_run_prints_a_config_that_can_be_used_and_starts_nothing(
    folder: Path, finish: Run
) -> None:
    printed = finish(*TRAIN, "--dry-run", "gconfig.n_samples=8")
    assert "# processes:" in printed
    assert "# not looked at: model.path: no/such-model" in printed
    assert "nothing was started" in printed
    assert not (folder / "runs").exists()
    (folder / "resolved.yaml").write_text(printed)
    resolved = load_config(folder / "resolved.yaml")
    assert isinstance(resolved, ExperimentConfig)
    assert resolved.gconfig.n_samples == 8


@pytest.fixture
def bare_python(folder: Path) -> str:
    """An environment without packages, whatever this one has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "bare"], cwd=folder, check=True)
    return "engine.python=bare/bin/python"


def test_dry_run_shows_servers_and_says_what_cannot_be_started(
    folder: Path, refused: Run, bare_python: str
) -> None:
    servers = ("engine.kind=vllm", "engine.num_servers=2", "engine.device=cpu", bare_python)
    printed = refused(*TRAIN, "--dry-run", *servers)
    assert "engine.kind=embedded" in printed
    assert "vllm-1" in printed
    assert "--port 0: a free one is chosen" in printed
    assert "agentrl_cli.launch.processes.trainer_program" in printed
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("arguments", [(), ("--overwrite",)])
def test_servers_are_not_started_and_nothing_is_deleted_for_a_mistake(
    folder: Path, refused: Run, bare_python: str, arguments: tuple[str, ...]
) -> None:
    kept = folder / "runs" / "demo" / "t0" / "trajectories" / "step-000001.parquet"
    kept.parent.mkdir(parents=True)
    kept.touch()
    text = refused(*TRAIN, *arguments, "engine.kind=vllm", "engine.device=cpu", bare_python)
    assert "needs the package vllm" in text
    assert "engine.python=PATH/bin/python" in text
    assert kept.exists()
    assert sorted(p.name for p in kept.parents[1].iterdir()) == ["trajectories"]


@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        ("gconfg: {}\n", (), "c.yaml:6: gconfg: unknown key; did you mean 'gconfig'?"),
        ("seed: x\n", (), "c.yaml:6: seed: expected a whole number"),
        ("a: [\n", (), "not valid YAML"),
        ("", ("gconfig.n_samples=1",), "Type gconfig.n_samples=8"),
        ("", ("engine.kind=sglang",), "or engine.kind=embedded"),
        ("", ("gconfig.n_samples",), "expected KEY=VALUE"),
        ("", ("--config", "cc.yaml"), "did you mean 'c.yaml'?"),
        ("", ("--dry-run", "train_dataset.path=task.jsonl"), "did you mean 'tasks.jsonl'?"),
    ],
)
def test_train_refuses_before_it_starts(
    folder: Path, refused: Run, change: str, arguments: tuple[str, ...], expected: str
) -> None:
    (folder / "c.yaml").write_text(CONFIG + change)
    text = refused(*TRAIN, *arguments)
    # A dry run shows its plan first.
    error = text[text.index("error: ") :] if "--dry-run" in arguments else text
    assert error.startswith("error: ")
    assert expected in error
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--base-url", "http://x/v1"), "Add --model NAME"),
        (("--model", "m"), "Add --base-url URL"),
        (("--base-url", "localhost:8000", "--model", "m"), "is no URL"),
        (("--checkpoint", "nowhere"), "no such folder"),
        (("--checkpoint", "."), "has no config.json"),
        (("--limit", "0"), "--limit"),
        (("--name", "all"), "--name all-1"),
        (("--name", "training"), "--name training-1"),
    ],
)
def test_eval_refuses_options_that_do_not_fit(
    folder: Path, refused: Run, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("eval", "--config", "c.yaml", *arguments)
    assert not (folder / "runs").exists()


def test_sft_refuses_with_its_own_keys(folder: Path, refused: Run) -> None:
    (folder / "sft.yaml").write_text("output_path: x\nmodel: {path: m}\ndataset: {pth: d}\n")
    text = refused("sft", "--config", "sft.yaml")
    assert "sft.yaml:3: dataset.pth: unknown key; did you mean 'path'?" in text


@pytest.fixture
def run(folder: Path) -> Path:
    """A run with one step, while it is still going on."""
    config = load_config(folder / "c.yaml", [f"output_dir={folder / 'runs'}"])
    call = Interaction(
        id="c1",
        messages=({"role": "user", "content": "1+1"},),
        reply={"role": "assistant", "content": "2"},
        prompt_ids=(1,),
        completion_ids=(2,),
        rollout_logprobs=(-0.5,),
        versions=(0,),
    )
    ids = {"id": "000001.000/0", "group_id": "000001.000", "task_id": "0"}
    trajectory = Trajectory(**ids, step=1, interactions=(call,), reward=1.0)
    with RunFolder.create_or_resume(config) as run_folder:
        run_folder.write_trajectories(1, [trajectory])
        run_folder.flush()
        yield run_folder.path.relative_to(folder)


def test_a_run_is_inspected_while_it_goes_on(run: Path, finish: Run) -> None:
    inspect = ("inspect-trajectories", str(run))
    assert "step 1" in finish(*inspect)
    (row,) = json.loads(finish(*inspect, "--step", "last", "--json"))["trajectories"]
    printed = finish(*inspect, row["id"], "--tokens")
    assert "user: 1+1" in printed
    assert "trained" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("runs/demo/t9",), "Did you mean runs/demo/t0?"),
        (("runs/demo/t0", "nobody"), "no trajectory 'nobody'"),
        (("runs/demo/t0", "--step", "9"), "stored steps: 1 to 1"),
        (("runs/demo/t0", "--step", "x"), "Allowed: 12, 3-7"),
        (("runs/demo/t0", "--min-reward", "1", "--max-reward", "0"), "nothing is in between"),
        (("runs/demo/t0", "--failure", "sometimes"), "--failure"),
        (("runs/demo/t0", "--tokenizer", "x"), "Add --tokens"),
    ],
)
def test_inspect_refuses_what_is_not_there(
    run: Path, refused: Run, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused("inspect-trajectories", *arguments)


def test_a_reader_that_goes_away_is_no_crash(folder: Path, run: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m agentrl_cli inspect-trajectories {run} --json | true; "
        "exit ${PIPESTATUS[0]}",
        shell=True,
        executable=shutil.which("bash"),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
