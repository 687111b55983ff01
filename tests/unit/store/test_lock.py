"""One command holds a run folder; the trainer that it started works in it, and nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store.folder_lock import FolderLock
from agentrl_cli.store.run_folder import RunFolder

HOLD = """
    import os, sys, time
    from pathlib import Path
    from agentrl_cli.store.folder_lock import FolderLock
    lock = FolderLock(Path(sys.argv[1]))
    # An orphan that keeps what it inherits.
    child = os.fork() if sys.argv[2] == "fork" else 0
    if child or sys.argv[2] != "fork":
        print("ready", child, flush=True)
    time.sleep(60)
"""
JOIN = """
    import sys, time
    from agentrl_cli.errors import RunFolderError
    from agentrl_cli.store.run_folder import RunFolder
    from agentrl_cli.store.working_copy import FolderOwner
    try:
        run = RunFolder.join(FolderOwner(int(sys.argv[2]), sys.argv[1]))
    except RunFolderError as error:
        sys.exit(f"refused: {error}")
    run.append_metrics({"step": 1})
    print("ready", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def start(program: str, *arguments: object, wrap: bool = False) -> subprocess.Popen[str]:
    """A process; with ``wrap`` as a grandchild, as under a process reaper."""
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)]
    if wrap:
        through = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
        command = [sys.executable, "-c", through, *command]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def join(path: Path, owner_pid: int, wrap: bool = False) -> str:
    return start(JOIN, path, owner_pid, 0, wrap=wrap).communicate(timeout=60)[0]


@contextmanager
def running(program: str, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that has what it wants and stays until it is killed, and the words that it said."""
    process = start(program, *arguments)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[0] == "ready", process.communicate()[0]
        yield process, words
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("way", ["alone", "fork"])
def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path, way: str) -> None:
    path = tmp_path / ".lock"
    with running(HOLD, path, way) as (process, [_, child]):
        with pytest.raises(RunFolderError, match=f"process {process.pid} is training") as caught:
            FolderLock(path)
        assert "trial_name=" in str(caught.value)
    FolderLock(path).release()
    if child != "0":
        os.kill(int(child), signal.SIGKILL)


def test_one_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path / ".lock")
    with pytest.raises(RunFolderError, match="this process"):
        FolderLock(tmp_path / ".lock")
    lock.release()
    lock.release()
    FolderLock(tmp_path / ".lock").release()


@pytest.mark.slow
def test_children_and_grandchildren_of_the_holder_may_join(folder: RunFolder) -> None:
    torn = folder.path / "checkpoints" / ".step-000003.tmp"
    torn.mkdir()
    for wrap in (False, True):
        assert join(folder.path, os.getpid(), wrap) == "ready\n"
    assert len(folder.read_metrics()) == 2
    assert not torn.exists(), "what a killed trainer left half written"
    folder.close()
    assert "held by nobody" in join(folder.path, os.getpid())


def test_a_stranger_is_refused_and_writes_nothing(folder: RunFolder) -> None:
    assert f"is held by process {os.getpid()}" in join(folder.path, os.getppid())
    with running("print('ready', flush=True); import time; time.sleep(60)") as (stranger, _):
        output = join(folder.path, stranger.pid)
    assert f"process {stranger.pid} did not start this one" in output
    assert "agentrl train --config" in output
    assert folder.read_metrics() == []


@pytest.mark.slow
def test_another_command_is_refused_while_the_trainer_is_there_and_while_it_is_not(
    folder: RunFolder,
) -> None:
    code = """
        import sys
        from agentrl_cli.config.config_file import load_config
        from agentrl_cli.store.run_folder import RunFolder
        RunFolder.create_or_resume(load_config(sys.argv[1]))
    """
    with running(JOIN, folder.path, os.getpid(), 60) as (trainer, _):
        for is_running in (True, False):
            if not is_running:
                trainer.kill()
                trainer.wait()
            output, _ = start(code, folder.config_path).communicate(timeout=60)
            assert f"process {os.getpid()} is training in this run folder" in output


@pytest.mark.slow
def test_the_next_command_waits_for_a_trainer_that_is_still_dying(make_config) -> None:
    """Killed with its command, a trainer may be gone a moment later: it must not write any more."""
    config = make_config()
    with RunFolder.create_or_resume(config) as run:
        path = run.path
        trainer = start(JOIN, path, os.getpid(), 60)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
    kill = f"import os, time; time.sleep(1); os.kill({trainer.pid}, {int(signal.SIGKILL)})"
    later = start(kill)
    with RunFolder.create_or_resume(config):
        assert trainer.wait(0.5) == -signal.SIGKILL
    later.communicate()
    trainer.communicate()


def test_two_trainers_of_one_command_are_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl_cli.store.working_copy._ORPHAN_SECONDS", 0.2)
    monkeypatch.setattr("agentrl_cli.store.working_copy.check_held_by", lambda *_: None)
    with (
        running(JOIN, folder.path, os.getpid(), 60) as (trainer, _),
        pytest.raises(RunFolderError, match=f"process {trainer.pid} is training"),
    ):
        RunFolder.join(folder.owner)
