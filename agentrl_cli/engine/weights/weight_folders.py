"""Versions of the weights in files, in RAM where there is room; those of dead runs are removed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from agentrl_cli.errors import EngineError, EngineTimeoutError, UserInputError
from agentrl_cli.scratch_folders import MEMORY_FOLDER, ScratchFolder, remove_leftovers

if TYPE_CHECKING:
    import torch

_GIB = 2**30
_DTYPE_NAMES = {
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
}


class VersionFolders:
    """Writes a folder for each version and keeps the last ones, all in one that is private."""

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
        self._root: ScratchFolder | None = None
        self._kept: list[Path] = []
        self._num_written = 0
        self._lock = threading.Lock()

    async def write(
        self,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        texts: Mapping[str, str] | None = None,
    ) -> Path:
        """A new folder with ``tensors`` (and text files by name).

        Raises:
            EngineError: there is no room, or the folder cannot be written.
            EngineTimeoutError: it was not finished in time.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return await asyncio.to_thread(self._write, version, dict(tensors), texts or {})
        except TimeoutError:
            raise EngineTimeoutError(
                f"the weights of version {version} were not written to {self._where()} after "
                f"{self._timeout_seconds:g} s (engine.publish_timeout_seconds). Type "
                f"engine.publish_timeout_seconds={2 * self._timeout_seconds:g} or more, or "
                "engine.weight_transfer.dir=FOLDER with a faster folder"
            ) from None
        except OSError as error:
            size = _count_bytes(tensors) / _GIB
            raise EngineError(
                f"the weights of version {version} ({size:.2f} GiB) cannot be written to "
                f"{self._where()}: {error}. Free some space there, or type "
                "engine.weight_transfer.dir=FOLDER with one that has more"
            ) from error

    def _where(self) -> str:
        return str(self._root.path) if self._root else self._directory or "a folder"

    def close(self) -> None:
        """Deletes everything."""
        with self._lock:
            self._kept.clear()
            if self._root is not None:
                self._root.close()
            self._root = None

    def _write(
        self, version: int, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str]
    ) -> Path:
        with self._lock:
            root = self._open(_count_bytes(tensors))
            # A version that is written again, as after a resume, gets a folder of its own.
            self._num_written += 1
            folder = root / f"{self._num_written:06d}-version-{version}"
            if len(self._kept) == self._num_kept:
                self._kept.pop(0).rename(folder)
            else:
                folder.mkdir(mode=0o700)
            try:
                _write_tensors(folder / self._file_name, tensors)
                for name, text in texts.items():
                    (folder / name).write_text(text, encoding="utf-8")
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._kept.append(folder)
            return folder

    def _open(self, num_bytes: int) -> Path:
        """The private folder, made on first use: only then is it known how much must fit."""
        if self._root is None:
            parent = _choose_parent(self._directory, self._num_kept * num_bytes)
            self._root = ScratchFolder("weights", parent)
        return self._root.path


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
        ScratchFolder("weights", parent).close()
    except OSError as error:
        reason = "is a file" if parent.is_file() else f"cannot be written to ({error.strerror})"
        raise UserInputError(
            f"engine.weight_transfer.dir: {directory} {reason}. Allowed: a folder with room for "
            "a copy of the weights that trainer and servers see. Type "
            "engine.weight_transfer.dir=null for one in RAM, or the name of another"
        ) from error


def _choose_parent(directory: str | None, num_bytes: int) -> Path:
    if directory is not None:
        parent = Path(directory).expanduser().absolute()
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers([parent])
        return parent
    remove_leftovers()
    if MEMORY_FOLDER.is_dir() and os.access(MEMORY_FOLDER, os.W_OK):
        state = os.statvfs(MEMORY_FOLDER)
        free = min(state.f_bavail * state.f_frsize, psutil.virtual_memory().available)
        if free > num_bytes:
            return MEMORY_FOLDER
    return Path(tempfile.gettempdir())


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file over the one that is there, if any.

    In RAM the pages of a new file cost six times as much as copying the weights into the old one
    (200 MB: 120 ms against 20 ms).
    """
    import torch

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The widest numbers first, so that all of them are aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        start, end = end, end + tensor.numel() * tensor.element_size()
        places = {"shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": _DTYPE_NAMES[str(tensor.dtype)], **places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
        file.truncate()


def _count_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
