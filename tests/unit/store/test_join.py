"""A trainer works in the folder that its command holds, and nobody else does."""

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
from agentrl_cli.store.resume_check import find_secrets, load_saved_config
from agentrl_cli.store.run_folder import RunFolder, run_dir_of

JOIN = """
    import sys, time
    from agentrl_cli.errors import RunFolderError
    from agentrl_cli.store.run_folder import RunFolder
    try:
        run = RunFolder.join(sys.argv[1], int(sys.argv[2]))
    except RunFolderError as error:
        sys.exit(f"refused: {error}")
    run.append_metrics({"step": 1})
    print("joined", flush=True)
    time.sleep(float(sys.argv[3]))
"""


def join(path: Path, owner_pid: int, seconds: float = 0.0, wrap: bool = False) -> subprocess.Popen:
    """A process that joins; with ``wrap`` as a grandchild, as under a process reaper."""
    command = [sys.executable, "-c", textwrap.dedent(JOIN), str(path), str(owner_pid), str(seconds)]
    if wrap:
        through = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"
        command = [sys.executable, "-c", through, *command]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


@contextmanager
def joined(path: Path) -> Iterator[subprocess.Popen]:
    """A trainer that has joined and stays until it is killed."""
    trainer = join(path, os.getpid(), seconds=60)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "joined\n"
        yield trainer
    finally:
        trainer.kill()
        trainer.communicate()


def test_children_and_grandchildren_of_the_holder_may_join(folder: RunFolder) -> None:
    torn = folder.path / "checkpoints" / ".step-000003.tmp"
    torn.mkdir()
    for wrap in (False, True):
        process = join(folder.path, os.getpid(), wrap=wrap)
        output, _ = process.communicate(timeout=60)
        assert output == "joined\n"
    assert len(folder.read_metrics()) == 2
    assert not torn.exists(), "what a killed trainer left half written"
    folder.close()
    output, _ = join(folder.path, os.getpid()).communicate(timeout=60)
    assert "refused" in output
    assert "held by nobody" in output


def test_a_stranger_is_refused_and_writes_nothing(folder: RunFolder) -> None:
    output, _ = join(folder.path, os.getppid()).communicate(timeout=60)
    assert "is held by process" in output
    assert str(os.getpid()) in output
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        output, _ = join(folder.path, stranger.pid).communicate(timeout=60)
    finally:
        stranger.kill()
        stranger.wait()
    assert f"process {stranger.pid} did not start this one" in output
    assert "agentrl train --config" in output
    assert folder.read_metrics() == []


def test_another_command_is_refused_while_the_trainer_is_there_and_while_it_is_not(
    folder: RunFolder, make_config
) -> None:
    code = """
        import sys
        from agentrl_cli.config.config_file import load_config
        from agentrl_cli.store.run_folder import RunFolder
        RunFolder.create_or_resume(load_config(sys.argv[1]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder.config_path)]
    with joined(folder.path) as trainer:
        for is_running in (True, False):
            if not is_running:
                trainer.kill()
                trainer.wait()
            other = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert f"process {os.getpid()} is training in this run folder" in other.stderr


def test_the_next_command_waits_for_a_trainer_that_is_still_dying(make_config) -> None:
    """Killed with its command, a trainer may be gone a moment later: it must not write any more."""
    config = make_config()
    with RunFolder.create_or_resume(config) as run:
        trainer = join(run.path, os.getpid(), seconds=60)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "joined\n"
    later = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time; time.sleep(1); "
         f"os.kill({trainer.pid}, {int(signal.SIGKILL)})"]
    )  # fmt: skip
    with RunFolder.create_or_resume(config):
        assert trainer.wait(0.5) == -signal.SIGKILL
    later.wait()
    trainer.communicate()


def test_two_trainers_of_one_command_are_refused(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(folder.path) as trainer:
        monkeypatch.setattr("agentrl_cli.store.run_folder._ORPHAN_SECONDS", 0.2)
        monkeypatch.setattr("agentrl_cli.store.run_folder.check_held_by", lambda *_: None)
        with pytest.raises(RunFolderError, match=f"process {trainer.pid} is training"):
            RunFolder.join(folder.path, os.getpid())


def test_the_saved_configuration_comes_back_whole_with_its_secrets(make_config) -> None:
    config = make_config(
        agent_builder_kwargs={
            "api_key": "geheim",
            "tools": [{"url": "http://x", "password": "p"}, "sk-abcdefgh"],
            "depth": 3,
        }
    )
    secrets = find_secrets(config.model_dump(mode="json"))
    with RunFolder.create_or_resume(config):
        path = run_dir_of(config)
        text = (path / "config.yaml").read_text()
        assert not any(secret in text for secret in ("geheim", "sk-abcdefgh"))
        assert load_saved_config(path) != config
        assert load_saved_config(path, secrets) == config
