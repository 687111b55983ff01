"""Private folders with the weights of the last versions; those of dead runs are removed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from agentrl_cli.engine.weight_transfer_file import WeightFile
from agentrl_cli.errors import EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

_PREFIX = "agentrl-weights-"
_LOCK_NAME = "lock"
_PARTIAL_NAME = "partial"
_MEMORY_FOLDER = Path("/dev/shm")
#: A folder without a lock is one in the making; after so long its maker is dead.
_UNLOCKED_SECONDS = 3600.0
#: What a thread may take longer than its deadline before nobody waits for it.
_GRACE_SECONDS = 5.0
_GIB = 2**30


@dataclass(slots=True)
class _Slot:
    """One version's folder, and the file in it that is written anew for a later version."""

    folder: Path
    file: WeightFile

    def rename(self, target: Path) -> None:
        self.folder = self.folder.rename(target)

    def remove(self) -> None:
        self.file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class VersionFolders:
    """Writes one folder for each version, and keeps the last ones.

    They lie in a folder of mode 0700 with a lock that the kernel lets go of when this process
    dies, however it dies: so the next run knows which folders nobody needs any more.
    """

    def __init__(
        self,
        directory: str | None,
        file_name: str,
        *,
        timeout_seconds: float,
        num_kept: int = 2,
    ) -> None:
        """Writes nothing yet.

        Args:
            directory: ``engine.weight_transfer.dir``; None: RAM where there is room, else the
                folder for temporary files.
            file_name: of the safetensors file in each folder.
            timeout_seconds: deadline of one version.
            num_kept: versions, 2 at least: the one that servers hold, the one before, and
                older ones that they may still read. The next version overwrites the oldest.
        """
        self._directory = directory
        self._file_name = file_name
        self._timeout_seconds = timeout_seconds
        self._num_kept = num_kept
        self._root: Path | None = None
        self._finalizer: Callable[[], object] | None = None
        self._slots: list[_Slot] = []
        self._num_written = 0
        self._lock = threading.Lock()

    @property
    def num_written(self) -> int:
        """Versions written so far."""
        return self._num_written

    @property
    def previous(self) -> Path | None:
        """The folder of the version before the last; None: there is none any more."""
        return self._slots[-2].folder if len(self._slots) > 1 else None

    async def write(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        texts: Mapping[str, str] | None = None,
    ) -> Path:
        """A new folder with ``tensors`` (and text files by name), complete when it appears.

        Raises:
            EngineError: there is no room, or the folder cannot be written.
            EngineTimeoutError: it was not finished in time.
        """
        deadline = time.monotonic() + self._timeout_seconds
        try:
            async with asyncio.timeout(self._timeout_seconds + _GRACE_SECONDS):
                return await asyncio.to_thread(
                    self._write, version, dict(tensors), dict(texts or {}), deadline
                )
        except TimeoutError:
            raise EngineTimeoutError(
                f"the weights of version {version} were not written to "
                f"{self._root or self._directory or 'a folder'} after {self._timeout_seconds:g} s "
                "(engine.publish_timeout_seconds). Type "
                f"engine.publish_timeout_seconds={2 * self._timeout_seconds:g} or more, or "
                "engine.weight_transfer.dir=FOLDER with a faster folder"
            ) from None
        except OSError as error:
            size = sum(t.numel() * t.element_size() for t in tensors.values()) / _GIB
            raise EngineError(
                f"the weights of version {version} ({size:.2f} GiB) cannot be written to "
                f"{self._root or self._directory}: {error}. {self._num_kept} versions must fit. "
                "Free some space, or type engine.weight_transfer.dir=FOLDER with one that has more"
            ) from error

    def close(self) -> None:
        """Deletes everything."""
        with self._lock:
            for slot in self._slots:
                slot.remove()
            self._slots.clear()
            if self._finalizer is not None:
                self._finalizer()
            self._root = self._finalizer = None

    def _write(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        texts: Mapping[str, str],
        deadline: float,
    ) -> Path:
        def check() -> None:
            if time.monotonic() > deadline:
                raise TimeoutError

        with self._lock:
            root = self._open(sum(t.numel() * t.element_size() for t in tensors.values()))
            slot = self._take_slot(root)
            try:
                slot.file.write(tensors, check)
                for name, text in texts.items():
                    (slot.folder / name).write_text(text, encoding="utf-8")
                self._num_written += 1
                slot.rename(root / f"{self._num_written:06d}-version-{version}")
            except BaseException:
                slot.remove()
                raise
            self._slots.append(slot)
            return slot.folder

    def _take_slot(self, root: Path) -> _Slot:
        """A folder under a name that nobody looks at: the oldest one, or a new one."""
        partial = root / _PARTIAL_NAME
        if len(self._slots) == self._num_kept:
            slot = self._slots.pop(0)
            slot.rename(partial)
            return slot
        partial.mkdir(mode=0o700)
        return _Slot(partial, WeightFile(partial / self._file_name, in_memory=_is_in_memory(root)))

    def _open(self, num_bytes: int) -> Path:
        """The private folder, made at the first use: only then is known how much must fit."""
        if self._root is None:
            parent = _choose_parent(self._directory, self._num_kept * num_bytes)
            self._root, descriptor = _make_locked_folder(parent)
            # At the interpreter's end too, should nobody close this.
            self._finalizer = weakref.finalize(self, _remove_folder, self._root, descriptor)
        return self._root


def check_writable(directory: str | None) -> None:
    """Refuses an ``engine.weight_transfer.dir`` in which no weights can be put.

    Makes the folder where there is none, as the first publication would.

    Raises:
        UserInputError: why, and what to type.
    """
    if directory is None:
        return
    parent = Path(directory).expanduser().absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent):
            pass
    except OSError as error:
        reason = "is a file" if parent.is_file() else f"cannot be written to ({error.strerror})"
        raise UserInputError(
            f"engine.weight_transfer.dir: {directory} {reason}. Allowed: a folder with room for "
            "two copies of the weights that trainer and servers see. Type "
            "engine.weight_transfer.dir=null for one in RAM, or the name of another"
        ) from error


def remove_folders_of_dead_runs(directory: str | None) -> None:
    """As :func:`remove_dead_folders`, wherever weights may lie.

    Args:
        directory: ``engine.weight_transfer.dir``.
    """
    parents = (
        [_MEMORY_FOLDER, Path(tempfile.gettempdir())]
        if directory is None
        else [Path(directory).expanduser()]
    )
    for parent in parents:
        if parent.is_dir():
            remove_dead_folders(parent)


def remove_dead_folders(parent: Path) -> None:
    """Deletes the weights that dead runs left in ``parent``: gigabytes, maybe of RAM."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            if folder.stat().st_uid == os.getuid() and _is_dead(folder):
                shutil.rmtree(folder)
                _log.info("removed %s, which a run that died had left behind", folder)
        except OSError as error:
            _log.warning("%s, left behind by a dead run, cannot be removed: %s", folder, error)


def _is_dead(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime > _UNLOCKED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _choose_parent(directory: str | None, num_bytes: int) -> Path:
    if directory is not None:
        parent = Path(directory).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        remove_dead_folders(parent)
        return parent
    if _MEMORY_FOLDER.is_dir() and os.access(_MEMORY_FOLDER, os.W_OK):
        remove_dead_folders(_MEMORY_FOLDER)
        if min(_count_free_bytes(_MEMORY_FOLDER), psutil.virtual_memory().available) > num_bytes:
            return _MEMORY_FOLDER
    parent = Path(tempfile.gettempdir())
    remove_dead_folders(parent)
    return parent


def _count_free_bytes(folder: Path) -> int:
    state = os.statvfs(folder)
    return state.f_bavail * state.f_frsize


def _is_in_memory(folder: Path) -> bool:
    return _MEMORY_FOLDER.is_dir() and folder.stat().st_dev == _MEMORY_FOLDER.stat().st_dev


def _make_locked_folder(parent: Path) -> tuple[Path, int]:
    """A new folder that only this user can open, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / _LOCK_NAME).exists():
                return folder, descriptor
        except BlockingIOError:
            _log.info("another run took %s for a dead run's: making another", folder)
        os.close(descriptor)


def _remove_folder(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
