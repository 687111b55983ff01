"""What a killed process leaves behind, and what the next one removes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_cli.scratch_folders import MEMORY_FOLDER, ScratchFolder, remove_leftovers

HOLDER = """
import multiprocessing, sys
from agentrl_cli.scratch_folders import ScratchFolder, name_semaphores
folder = ScratchFolder("keys")
(folder.path / "server-0.yaml").write_text("api_key: secret")
print(folder.path, flush=True)
print(name_semaphores().path, flush=True)
# As a pool of reward workers has them; killed with the process that would remove it.
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name.removeprefix("/"), flush=True)
from multiprocessing import resource_tracker
import os, signal
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_next_start_removes_what_killed_processes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stranger = tmp_path / "agentrl-mine"
    stranger.mkdir()
    holders, left = [], []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        keys, semaphores, name, ready = (process.stdout.readline().strip() for _ in range(4))
        assert ready == "ready"
        holders.append(process)
        left.append((Path(keys), Path(semaphores), MEMORY_FOLDER / f"sem.{name}"))
    killed, _ = holders
    try:
        killed.kill()
        killed.wait()
        assert all(path.exists() for path in (*left[0], *left[1]))
        remove_leftovers()
        assert not any(path.exists() for path in left[0])
        assert all(path.exists() for path in (*left[1], stranger))
    finally:
        for process in holders:
            process.kill()
            process.communicate()
        remove_leftovers()


def test_a_folder_is_private_and_ends_with_its_block(tmp_path: Path) -> None:
    with ScratchFolder("keys", tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        remove_leftovers([tmp_path])
        assert folder.path.is_dir()
    folder.close()
    assert list(tmp_path.iterdir()) == []
