"""One run at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store.files import store_errors

#: POSIX locks belong to a process, so that two owners inside one must be told apart here.
_held: set[Path] = set()
_held_guard = threading.Lock()


class FolderLock:
    """Holds ``path`` for this process until :meth:`release`; the system frees it on SIGKILL.

    A POSIX record lock, not ``flock``: children made by fork (reward processes) do
    not inherit it, so an orphan cannot keep the folder of a dead run closed.
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
        os.pwrite(descriptor, f"process {os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives the folder back; may be called twice."""
        with _held_guard:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
                _held.discard(self._path)


def _refusal(path: Path, owner: str) -> str:
    return (
        f"{path.parent}: {owner} is training in this run folder at this moment, and two runs "
        "in one folder would spoil each other. Wait for it, stop it, or type another "
        "trial_name=NAME. (agentrl inspect-trajectories reads while a run goes on.)"
    )
