"""One run at a time in a run folder, and one trainer at a time in a run."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store.atomic_files import store_errors

#: POSIX locks belong to a process, so two owners inside one must be distinguished here.
_held: set[Path] = set()

#: C's ``struct flock``; its type is the first number, or the fourth on macOS.
_FLOCK = "qqihh" if sys.platform == "darwin" else "hhqqi"


class FolderLock:
    """Holds ``path`` for this process until :meth:`release`; the system frees it on SIGKILL.

    A POSIX record lock, not ``flock``: forked children (reward processes) do not inherit it, so
    that an orphan cannot keep the folder of a dead run locked.

    Raises:
        RunFolderError: somebody else still holds it after ``wait_seconds``.
    """

    def __init__(self, path: Path, *, wait_seconds: float = 0.0) -> None:
        self._path = path.resolve()
        deadline = time.monotonic() + wait_seconds
        while (owner := self._try_to_take()) is not None:
            if time.monotonic() >= deadline:
                raise RunFolderError(format_held(str(path.parent), owner))
            time.sleep(0.05)

    def _try_to_take(self) -> str | None:
        """Who holds it; None: this object does now."""
        if self._path in _held:
            # To open and close the file would free it.
            return "this process"
        with store_errors(self._path):
            self._path.touch(0o600)
            self._file = self._path.open("a+")
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self._file.seek(0)
                owner = self._file.read(64).strip()
                self._file.close()
                return owner or "another process"
            _held.add(self._path)
            self._file.truncate(0)
            self._file.write(_describe(os.getpid()))
            self._file.flush()
        return None

    def release(self) -> None:
        """Frees the folder; may be called twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()
            _held.discard(self._path)


class LockState(NamedTuple):
    """Who holds a lock, as far as this machine can tell."""

    is_held: bool
    pid: int | None = None
    """The process, if it is one that this machine (or container) can see."""
    was_freed: bool = True
    """False: nobody is seen to hold it, and who did has not given it back: killed, or on another
    machine whose locks are not seen here."""


def look_up_lock(path: Path) -> LockState:
    """Who holds ``path``; never takes it, so that no run is kept from starting.

    Raises:
        OSError: it cannot be read, or its place has no locks.
    """
    path = path.resolve()
    if path in _held:
        # The system says nothing of a process's own locks, and to close the file would free it.
        return LockState(True, os.getpid())
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        return LockState(False)
    with file:
        is_mac = sys.platform == "darwin"
        asked = (0, 0, 0, fcntl.F_WRLCK, 0) if is_mac else (fcntl.F_WRLCK, 0, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *asked))
        found = struct.unpack(_FLOCK, answer)
        kind, pid = (found[3], found[2]) if is_mac else (found[0], found[4])
        if kind == fcntl.F_UNLCK:
            return LockState(False, was_freed=not file.read(1))
        # Linux gives 0 or less for processes of other machines and containers.
        return LockState(True, pid if pid > 0 else None)


def format_held(location: str, owner: str) -> str:
    """The message of a run that finds another in its folder."""
    return (
        f"{location}: {owner} is training in this run folder at the moment, and two runs in one "
        "folder would overwrite each other. Wait for it, stop it, or type another "
        "trial_name=NAME. (agentrl inspect-trajectories works while a run continues.)"
    )


def check_held_by(path: Path, owner_pid: int) -> None:
    """Returns if the process ``owner_pid`` holds ``path`` and is an ancestor of this one.

    Raises:
        RunFolderError: nobody holds it, another process does, or a stranger asks.
    """
    # What a killed process leaves in the file names nobody's ancestor.
    owner = path.read_text(errors="replace") if path.is_file() else ""
    is_ancestor = owner_pid in {process.pid for process in psutil.Process().parents()}
    if owner != _describe(owner_pid) or not is_ancestor:
        raise RunFolderError(
            f"{path.parent}: this trainer does not belong to the run that trains here: the folder "
            f"is held by {owner or 'nobody'}, and process {owner_pid} "
            f"{'started' if is_ancestor else 'did not start'} this one. Trainers are started by "
            "the command. Type agentrl train --config FILE"
        )


def _describe(pid: int) -> str:
    return f"process {pid}"
