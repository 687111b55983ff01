from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store.folder_lock import FolderLock

HOLD = """
    import sys, time
    from pathlib import Path
    from agentrl_cli.store.folder_lock import FolderLock
    lock = FolderLock(Path(sys.argv[1]))
    {extra}
    print("held", flush=True)
    time.sleep(60)
"""


def hold(path, extra: str = "") -> subprocess.Popen[str]:
    code = textwrap.dedent(HOLD).format(extra=extra)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path) -> None:
    path = tmp_path / ".lock"
    process = hold(path)
    try:
        with pytest.raises(RunFolderError, match=f"process {process.pid} is training") as caught:
            FolderLock(path)
        assert "trial_name=" in str(caught.value)
    finally:
        kill(process)
    FolderLock(path).release()


def test_an_orphan_made_by_fork_does_not_keep_the_lock(tmp_path) -> None:
    path = tmp_path / ".lock"
    fork = "import os\n    child = os.fork()\n    if child == 0: time.sleep(60)\n    print(child)"
    code = textwrap.dedent(HOLD.replace("{extra}", fork))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert process.stdout.readline() == "held\n"
        kill(process)
        FolderLock(path).release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_one_process_cannot_hold_it_twice(tmp_path) -> None:
    lock = FolderLock(tmp_path / ".lock")
    with pytest.raises(RunFolderError, match="this process"):
        FolderLock(tmp_path / ".lock")
    lock.release()
    lock.release()
    FolderLock(tmp_path / ".lock").release()
