"""What agentrl runs finds out about runs: whether they run, how far they are, what is damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError
from agentrl_cli.inspector.run_list import find_last_reward, list_runs, name_run
from agentrl_cli.records import Trajectory
from agentrl_cli.store.folder_lock import look_up_lock
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import LatestEval, RunOutline, read_outline

HOLD = """
    import sys, time
    from pathlib import Path
    from agentrl_cli.store.folder_lock import FolderLock
    lock = FolderLock(Path(sys.argv[1]))
    print("ready", flush=True)
    time.sleep(60)
"""
#: Lists the current folder as a user who may not look into everything.
LIST_AS_NOBODY = """
    import os
    from agentrl_cli.inspector.run_list import list_runs
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
    for run in list_runs("."):
        print(run.path, run.status, *run.problems)
"""


@contextmanager
def holding(run: Path) -> Iterator[int]:
    """The id of another process that holds the run, until it is killed."""
    program = textwrap.dedent(HOLD)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run / ".lock")], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def make_run(run_config: Callable[..., ExperimentConfig]) -> Callable[..., Path]:
    def make(trial: str = "t0", num_steps: int = 0, total_steps: int = 3) -> Path:
        config = run_config(trial_name=trial, train={"total_steps": total_steps})
        with RunFolder.create_or_resume(config) as folder:
            for step in range(1, num_steps + 1):
                reward = float("nan") if step == 2 else step / 10
                metrics = {"step": step, "reward_mean": reward, "step_seconds": 2.5}
                folder.append_metrics(metrics)
            return folder.path

    return make


def list_one(path: Path) -> RunOutline:
    (run,) = list_runs(str(path))
    return run


def test_a_run_is_running_while_a_living_process_holds_it(make_run: Callable[..., Path]) -> None:
    path = make_run(num_steps=2)
    assert list_one(path).status == "stopped"
    with holding(path) as pid:
        for _ in range(2):
            # The second time too: to look does not free it.
            run = list_one(path)
            assert (run.status, run.pid, run.step, run.total_steps) == ("running", pid, 2, 3)
    # Killed: what it has left in the file says nothing.
    assert (path / ".lock").read_text() == f"process {pid}"
    assert (list_one(path).status, list_one(path).host) == ("stopped", None)


def test_to_look_neither_takes_nor_frees_a_lock(
    run_config: Callable[..., ExperimentConfig],
) -> None:
    with RunFolder.create_or_resume(run_config()) as folder:
        assert read_outline(folder.path).pid == os.getpid()
        program = (
            "import sys; from pathlib import Path; from agentrl_cli.store.folder_lock import *"
        )
        command = f"{program}; print(look_up_lock(Path(sys.argv[1])).pid)"
        words = [sys.executable, "-c", command, str(folder.path / ".lock")]
        assert subprocess.check_output(words, text=True) == f"{os.getpid()}\n"
    assert look_up_lock(folder.path / ".lock").was_freed


def test_a_run_that_was_started_elsewhere_and_did_not_end_may_be_running(
    make_run: Callable[..., Path],
) -> None:
    path = make_run()
    (path / "manifest.json").write_text('{"starts": [{"host": {"name": "node7"}}]}')
    assert list_one(path).status == "stopped"
    (path / ".lock").write_text("process 123")
    assert (list_one(path).status, list_one(path).host) == ("unknown", "node7")


def test_what_is_done_is_read(make_run: Callable[..., Path]) -> None:
    path = make_run(num_steps=3)
    trajectory = Trajectory(id="g/0", group_id="g", task_id="1", step=1)
    folder = RunFolder.open(path)
    folder.write_eval(0, [trajectory], {"mean_reward": 0.25})
    folder.write_eval(2, [trajectory], {"mean_reward": 0.5})
    folder.write_eval(3, [trajectory], {"mean_reward": 0.75}, label="by-hand")
    # A line that is being written.
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4.0, "reward_mean": 0.9')
    run = list_one(path)
    assert (run.status, run.step, run.seconds, run.problems) == ("finished", 3, 7.5, ())
    assert (run.rewards[0], find_last_reward(run)) == (0.1, 0.3)
    assert run.latest_eval == LatestEval(2, None, 0.5)
    # What the whole file says is what is read of it.
    metrics = folder.read_metrics()
    assert [m["reward_mean"] for m in metrics] == pytest.approx(run.rewards, nan_ok=True)
    assert folder.load_config().train.total_steps == run.total_steps


def test_the_newest_is_first_from_any_folder(make_run: Callable[..., Path]) -> None:
    old, new = make_run("old", 1), make_run("new", 1)
    for path in old.rglob("*"):
        os.utime(path, (1000.0, 1000.0))
    # A page that is made later is not the run's activity.
    (old / "report.html").write_text("")
    for folder in (old.parent, old.parent.parent, old.parent.parent.parent):
        runs = list_runs(str(folder))
        assert [name_run(run) for run in runs] == ["exp/new", "exp/old"]
    assert runs[1].last_activity == 1000.0
    shutil.rmtree(new)
    assert name_run(list_one(old)) == "exp/old"


@pytest.mark.parametrize(
    ("name", "content", "status", "problem"),
    [
        ("config.yaml", b"train: [", "damaged", "train.total_steps is not found"),
        ("config.yaml", None, "damaged", "config.yaml: is missing"),
        ("metrics.jsonl", b"\0\xff" * 99, "stopped", "no line of it is a step's"),
        ("metrics.jsonl", b'{"step": 1e999}\n', "stopped", "no line of it is a step's"),
        ("trajectories/eval-000002.json", b"[" * 10**6, "stopped", "cannot be read"),
        ("trajectories/eval-000002.json", b"[1]", "stopped", "is damaged"),
        (
            "trajectories/eval-000002.json",
            b'{"mean_reward": 1' + b"0" * 400 + b"}",
            "stopped",
            "t0",
        ),
    ],
)
def test_damage_is_told_and_the_others_are_listed(
    make_run: Callable[..., Path], name: str, content: bytes | None, status: str, problem: str
) -> None:
    path = make_run(num_steps=2)
    make_run("fine", 3)
    (path / name).unlink(missing_ok=True)
    if content is not None:
        (path / name).write_bytes(content)
    runs = {name_run(run): run for run in list_runs(str(path.parent))}
    assert (runs["exp/t0"].status, len(runs["exp/t0"].problems)) == (status, 1)
    assert problem in runs["exp/t0"].problems[0]
    assert (runs["exp/fine"].status, runs["exp/fine"].problems) == ("finished", ())


def test_what_may_not_be_looked_into_is_listed(make_run: Callable[..., Path]) -> None:
    closed, half_open = make_run("closed"), make_run("half-open")
    for path in (closed.parent, half_open, half_open / "trajectories"):
        path.chmod(0o755)
    closed.chmod(0)
    for path in half_open.iterdir():
        path.chmod(0 if path.is_file() else 0o755)
    command = [sys.executable, "-c", textwrap.dedent(LIST_AS_NOBODY)]
    output = subprocess.check_output(command, cwd=closed.parent, text=True)
    closed.chmod(0o755)
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert set(lines) == {"closed", "half-open"}
    for line in lines.values():
        assert line.split()[1] == "unknown"
        assert "Permission denied" in line


def test_an_evaluation_alone_is_no_damaged_run(run_config: Callable[..., ExperimentConfig]) -> None:
    with RunFolder.for_evaluation(run_config()) as folder:
        folder.write_eval(0, [], {"mean_reward": 0.5}, label="base")
    run = list_one(folder.path)
    assert (run.status, run.latest_eval) == ("evaluation", LatestEval(0, "base", 0.5))


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("s3://bucket/runs/", "inspect-trajectories s3://bucket/runs/EXPERIMENT/TRIAL"),
        ("nowhere/at-all", "there is no such folder. Type  agentrl runs DIR"),
        (__file__, "is a file"),
    ],
)
def test_what_is_no_folder_is_refused(location: str, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        list_runs(location)
