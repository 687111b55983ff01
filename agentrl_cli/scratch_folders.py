"""Folders for what is needed only while a process lives, removed later if it was killed.

Weights, keys and rendezvous files lie in folders of mode 0700 with a lock that the kernel releases
when the process dies, however it dies: so the next run can tell which of them nobody needs any
more. Semaphores, which the system keeps as files too, are named after such a folder.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Self

from agentrl_cli.log import get_logger

_log = get_logger(__name__)

#: In RAM, where there is one; also where Linux keeps semaphores.
MEMORY_FOLDER = Path("/dev/shm")
_PREFIX = "agentrl-"
#: A name that no folder of anybody else's has by chance: what has it is deleted.
_LOCK_NAME = "agentrl-scratch.lock"


class ScratchFolder:
    """A new folder at ``path``, until it is closed or collected, or the process ends.

    Args:
        kind: what it is for, as a part of its name.
        parent: where it is made; None: in the folder for temporary files.
    """

    def __init__(self, kind: str, parent: Path | None = None) -> None:
        folder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{kind}-", dir=parent)
        self.path = Path(folder.name)
        # Held before it has its name: a folder without a lock is left alone by other runs.
        lock = (self.path / "unlocked").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        (self.path / "unlocked").rename(self.path / _LOCK_NAME)
        self._finalizers = [weakref.finalize(self, one) for one in (lock.close, folder.cleanup)]

    def close(self) -> None:
        """Deletes it; may be called twice."""
        for finalize in reversed(self._finalizers):
            finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def remove_leftovers(parents: Iterable[Path] = ()) -> None:
    """Deletes what killed runs have left in these folders, in RAM and among temporary files."""
    places = {*parents, MEMORY_FOLDER, Path(tempfile.gettempdir())}
    for lock in (lock for place in places for lock in place.glob(f"{_PREFIX}*/{_LOCK_NAME}")):
        folder = lock.parent
        try:
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_semaphores(folder)
                shutil.rmtree(folder)
            _log.info("removed %s, which a run that died had left behind", folder)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            continue  # It is in use, gone, or another user's.
        except OSError as error:
            _log.warning("%s, left by a dead run, cannot be removed: %s", folder, error)


def remove_semaphores(folder: Path) -> None:
    """Deletes the semaphores that are named after the folder."""
    for semaphore in MEMORY_FOLDER.glob(f"sem.{folder.name}-*"):
        semaphore.unlink(missing_ok=True)


@cache
def name_semaphores() -> ScratchFolder:
    """The folder that this process's semaphores are named after, from the first call on.

    Their own name says nothing of whom they belong to.
    """
    folder = ScratchFolder("semaphores")
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    settings["semprefix"] = f"/{folder.path.name}"
    return folder
