"""The user's cache folder, and folders in it that are made once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from agentrl_cli.errors import ModelError, RunError
from agentrl_cli.log import Observer
from agentrl_cli.models.stopping import CheckStop, go_on

#: Another process that makes the same folder is waited for this long; ten times what it takes.
_LOCK_TIMEOUT_SECONDS = 1200.0
_LOCK_POLL_SECONDS = 0.2


def resolve_cache_folder() -> Path:
    """The folder that agentrl keeps its own files in, between runs.

    ``AGENTRL_CACHE``, else ``XDG_CACHE_HOME/agentrl``, else ``~/.cache/agentrl``.
    """
    own = os.environ.get("AGENTRL_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "agentrl"


def make_once(
    name: str,
    make: Callable[[Path], object],
    observer: Observer,
    check_stop: CheckStop = go_on,
) -> Path:
    """The cache's folder ``name``, which ``make`` fills if it is not there yet.

    ``make`` gets a path that does not exist, beside the final one, and makes a folder of
    it, which is renamed when it is whole. Processes that want the same folder take turns;
    ``check_stop`` is called while one waits for its own.

    Raises:
        ModelError: the cache folder cannot be written.
        RunError: another process holds the lock for too long.
    """
    cache = resolve_cache_folder()
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _wait_for_lock(cache / f"{name}.lock", observer, check_stop):
            if not folder.is_dir():
                _make_and_rename(folder, make)
    except OSError as error:
        raise ModelError(
            f"the cache folder {cache} cannot be written: {error}. Type "
            "AGENTRL_CACHE=SOME_FOLDER before the command"
        ) from error
    return folder


def _wait_for_lock(path: Path, observer: Observer, check_stop: CheckStop) -> FileLock:
    """The lock, held; a process that dies lets go of it."""
    lock = FileLock(path)
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    is_told = False
    while True:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not is_told:
                observer.on_message(f"another process is making {path.stem}: waiting for it")
                is_told = True
        else:
            return lock
        check_stop()
        if time.monotonic() > deadline:
            raise RunError(
                f"another process has held {path} for {_LOCK_TIMEOUT_SECONDS:.0f} seconds. End "
                "it, or type AGENTRL_CACHE=ANOTHER_FOLDER before the command"
            )
        time.sleep(_LOCK_POLL_SECONDS)


def _make_and_rename(folder: Path, make: Callable[[Path], object]) -> None:
    """Fills a temporary folder and renames it; what a killed process left behind is removed."""
    for leftover in folder.parent.glob(f"{folder.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        make(partial)
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
