"""One run at a time in a run folder, and one trainer at a time in a run."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import psutil

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store.atomic_files import store_errors

#: POSIX locks belong to a process, so two owners inside one must be distinguished here.
_held: set[Path] = set()
_held_guard = threading.Lock()


class FolderLock:
    """Holds ``path`` for this process until :meth:`release`; the system frees it on SIGKILL.

    A POSIX record lock, not ``flock``: forked children (reward processes) do not inherit it, so
    that an orphan cannot keep the folder of a dead run locked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._descriptor: int | None = None
        with _held_guard:
            if self._path in _held:
                raise RunFolderError(_refusal(path, "this process"))
            with store_errors(path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                owner = os.read(descriptor, 64).decode(errors="replace").strip()
                os.close(descriptor)
                raise RunFolderError(_refusal(path, owner or "another process")) from None
            except OSError:
                os.close(descriptor)
                raise
            _held.add(self._path)
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_describe(os.getpid())}\n".encode(), 0)

    def release(self) -> None:
        """Frees the folder; may be called twice."""
        with _held_guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                _held.discard(self._path)


def check_held_by(path: Path, owner_pid: int) -> None:
    """Returns if the process ``owner_pid`` holds ``path`` and is an ancestor of this one.

    Raises:
        RunFolderError: nobody holds it, another process does, or a stranger asks.
    """
    if not psutil.pid_exists(owner_pid) or owner_pid not in {
        process.pid for process in psutil.Process().parents()
    }:
        raise RunFolderError(_stranger(path, f"process {owner_pid} did not start this one"))
    try:
        written = path.read_text(errors="replace").strip()
    except OSError as error:
        raise RunFolderError(_stranger(path, f"its lock cannot be read ({error})")) from None
    if written != _describe(owner_pid):
        raise RunFolderError(_stranger(path, f"it is held by {written or 'nobody'}"))
    try:
        FolderLock(path).release()
    except RunFolderError:
        return
    raise RunFolderError(_stranger(path, "it is not held at this moment"))


def wait_until_free(path: Path, timeout_seconds: float) -> None:
    """Returns as soon as nobody holds ``path``.

    Raises:
        RunFolderError: somebody still does after ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    while path.exists():
        try:
            FolderLock(path).release()
        except RunFolderError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _describe(pid: int) -> str:
    return f"process {pid}"


def _stranger(path: Path, why: str) -> str:
    return (
        f"{path.parent}: this trainer does not belong to the run that trains here: {why}. Trainers "
        "are started by the command. Type agentrl train --config FILE"
    )


def _refusal(path: Path, owner: str) -> str:
    return (
        f"{path.parent}: {owner} is training in this run folder at the moment, and two runs "
        "in one folder would overwrite each other. Wait for it, stop it, or type another "
        "trial_name=NAME. (agentrl inspect-trajectories works while a run continues.)"
    )
