"""Weights to servers through files, in RAM where there is room; those of dead runs are removed."""

from __future__ import annotations

import asyncio
import fcntl
import json
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
from safetensors import SafetensorError

from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.errors import EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.log import get_logger

if TYPE_CHECKING:
    import torch

_log = get_logger(__name__)

_PREFIX = "agentrl-weights-"
_LOCK_NAME = "lock"
_PARTIAL_NAME = "partial"
_MEMORY_FOLDER = Path("/dev/shm")
#: A folder without a lock is being made; after so long its maker must be dead.
_UNLOCKED_SECONDS = 3600.0
#: What a thread may take longer than its deadline before nobody waits for it.
_GRACE_SECONDS = 5.0
_GIB = 2**30


@dataclass(slots=True)
class _VersionFolder:
    """A version's folder. Its file is reused for a later version."""

    path: Path
    views: dict[str, torch.Tensor] | None = None
    """The tensors in the file as a mapping of the file itself: copying into them replaces its
    content. None: the file is on a disk, or there is none yet."""


class VersionFolders:
    """Writes a folder for each version and keeps the last ones.

    They are in a folder of mode 0700 with a lock that the kernel releases when this process
    dies, however it dies, so that the next run can tell which folders nobody needs any more.
    """

    def __init__(
        self, directory: str | None, file_name: str, *, timeout_seconds: float, num_kept: int = 1
    ) -> None:
        """Writes nothing yet.

        Args:
            directory: ``engine.weight_transfer.dir``; None: RAM where there is room, else the
                folder for temporary files.
            file_name: of the safetensors file in each folder.
            timeout_seconds: deadline for writing one version.
            num_kept: number of versions. The next one takes the place of the oldest: servers copy
                what they read, so one is enough where none goes back to an older one.
        """
        self._directory = directory
        self._file_name = file_name
        self._timeout_seconds = timeout_seconds
        self._num_kept = num_kept
        self._root: Path | None = None
        self._finalizer: Callable[[], object] | None = None
        self._kept: list[_VersionFolder] = []
        self._num_written = 0
        self._lock = threading.Lock()

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
        except (OSError, SafetensorError) as error:
            size = _count_bytes(tensors) / _GIB
            raise EngineError(
                f"the weights of version {version} ({size:.2f} GiB) cannot be written to "
                f"{self._root or self._directory}: {error}. Free some space there, or type "
                "engine.weight_transfer.dir=FOLDER with one that has more"
            ) from error

    def close(self) -> None:
        """Deletes everything."""
        with self._lock:
            self._kept.clear()
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
        with self._lock:
            root = self._open(_count_bytes(tensors))
            # Nobody looks for a folder under this name.
            partial = root / _PARTIAL_NAME
            if len(self._kept) == self._num_kept:
                folder = self._kept.pop(0)
                folder.path.rename(partial)
            else:
                folder = _VersionFolder(partial)
                partial.mkdir(mode=0o700)
            try:
                file = partial / self._file_name
                folder.views = _write_tensors(file, tensors, folder.views)
                for name, text in texts.items():
                    (partial / name).write_text(text, encoding="utf-8")
                if time.monotonic() > deadline:
                    raise TimeoutError
                self._num_written += 1
                folder.path = partial.rename(root / f"{self._num_written:06d}-version-{version}")
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self._kept.append(folder)
            return folder.path

    def _open(self, num_bytes: int) -> Path:
        """The private folder, made on first use: only then is it known how much must fit."""
        if self._root is None:
            parent = _choose_parent(self._directory, self._num_kept * num_bytes)
            self._root, descriptor = _make_locked_folder(parent)
            # Also when the interpreter exits, should nobody close this.
            self._finalizer = weakref.finalize(self, _remove_folder, self._root, descriptor)
        return self._root


@dataclass(frozen=True, slots=True)
class FolderUpdate:
    """A version's weights as a folder with a safetensors file."""

    version: int
    folder: Path

    async def apply(self, server: EngineServer) -> None:
        """Makes ``server`` read the folder."""
        await server.load_weights(self.folder)


class FolderTransfer:
    """All weights as a safetensors file that each server reads for itself.

    The file is also the snapshot: the learner may change its tensors as soon as
    :meth:`prepare` returns, and a server that comes back later still finds them.
    """

    def __init__(self, folders: VersionFolders, *, tied_names: Mapping[str, str]) -> None:
        """Writes nothing yet.

        Args:
            folders: where versions are written.
            tied_names: further name of a tensor -> the name it is published under; both are
                written, for servers that keep the two apart.
        """
        self._folders = folders
        self._tied_names = dict(tied_names)

    async def prepare(self, version: int, weights: Mapping[str, torch.Tensor]) -> FolderUpdate:
        """Writes the weights; raises as :meth:`VersionFolders.write`."""
        # safetensors refuses to write one tensor under two names.
        copies = {
            alias: weights[name].clone()
            for alias, name in self._tied_names.items()
            if alias not in weights
        }
        return FolderUpdate(version, await self._folders.write(version, {**weights, **copies}))

    async def close(self) -> None:
        """Deletes the files."""
        self._folders.close()


def check_writable(directory: str | None) -> None:
    """Refuses an ``engine.weight_transfer.dir`` that weights cannot be written to.

    Creates the folder if there is none, as the first publication would.

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
            "a copy of the weights that trainer and servers see. Type "
            "engine.weight_transfer.dir=null for one in RAM, or the name of another"
        ) from error


def remove_folders_of_dead_runs(directory: str | None) -> None:
    """Deletes the weights that dead runs left behind: gigabytes, maybe of RAM.

    Args:
        directory: ``engine.weight_transfer.dir``.
    """
    parents = (
        [_MEMORY_FOLDER, Path(tempfile.gettempdir())]
        if directory is None
        else [Path(directory).expanduser()]
    )
    for folder in (folder for parent in parents for folder in parent.glob(f"{_PREFIX}*")):
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
    remove_folders_of_dead_runs(directory)
    if directory is not None:
        parent = Path(directory).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        return parent
    if _MEMORY_FOLDER.is_dir() and os.access(_MEMORY_FOLDER, os.W_OK):
        state = os.statvfs(_MEMORY_FOLDER)
        free = min(state.f_bavail * state.f_frsize, psutil.virtual_memory().available)
        if free > num_bytes:
            return _MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def _write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], views: dict[str, torch.Tensor] | None
) -> dict[str, torch.Tensor] | None:
    """Writes a safetensors file, into the ``views`` of one that is there already if they fit.

    In RAM the pages of a new file cost six times as much as copying the weights into the old one
    (200 MB: 120 ms against 20 ms), and a file that is written beside the old one twice the memory.

    Returns:
        The new file's tensors as views of it, where it is in RAM. A disk may be full when a page
        is written, which would end the process without a message.
    """
    if views is not None and views.keys() == tensors.keys():
        pairs = [(views[name], tensor) for name, tensor in tensors.items()]
        if all(v.dtype == t.dtype and v.shape == t.shape for v, t in pairs):
            for view, tensor in pairs:
                view.copy_(tensor)
            return views
    from safetensors.torch import save_file

    path.unlink(missing_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    return _map_tensors(path, tensors) if _is_in_memory(path.parent) else None


def _map_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_header_bytes))
    content = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)[
        8 + num_header_bytes :
    ]
    views = {}
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        views[name] = content[start:end].view(tensor.dtype).view(tensor.shape)
    return views


def _count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


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
            _log.info("another run removed %s, taking it for a dead run's: making another", folder)
        os.close(descriptor)


def _remove_folder(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
