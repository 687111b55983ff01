"""A run folder on the disk of the command's machine, for trainers on other nodes.

They work on a copy, as with object storage; its place is an actor beside the command, which writes
the files. Nothing lasts in Ray's object store: what was written is on that disk.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from agentrl_cli.errors import StoreError
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import sync_folder
from agentrl_cli.store.remote.remote_files import TaggedContent, UnreachableError

SCHEME = "ray"
#: The actor's name, in the namespace of the run.
ACTOR = "run-folder"
_PART_BYTES = 2**26
_CALL_SECONDS = 60.0


class FolderHost:
    """Reads and writes the files of a run folder for the trainer that may.

    Args:
        path: the folder, which the command holds.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lease_id = ""
        self._num_reads = 0

    def admit(self) -> str:
        """The lease of a new trainer; what an earlier one still sends is refused from now on."""
        self._lease_id = uuid.uuid4().hex
        return self._lease_id

    def describe(self) -> str:
        """What a user calls the folder."""
        return str(self._path)

    def list_names(self, folder: str) -> dict[str, int]:
        """Complete files below ``folder``, with their sizes."""
        files = (file for file in (self._path / folder).rglob("*") if file.is_file())
        names = {file.relative_to(self._path): file.stat().st_size for file in files}
        # What is being written, and what the command writes for itself.
        return {
            name.as_posix(): size
            for name, size in names.items()
            if not any(part.startswith(".") for part in name.parts)
        }

    def read(self, name: str, start: int, max_bytes: int) -> bytes | None:
        """A part of a file; None: there is none."""
        if name == layout.LOCK:
            # The command holds the folder as long as this actor lives.
            self._num_reads += 1
            return json.dumps({"id": self._lease_id, "beat": self._num_reads}).encode()
        try:
            with (self._path / name).open("rb") as file:
                file.seek(start)
                return file.read(max_bytes)
        except FileNotFoundError:
            return None

    def write(self, lease_id: str, name: str, start: int, content: bytes, is_last: bool) -> None:
        """A part of a file, which appears, complete and on disk, with the last.

        Raises:
            StoreError: a new trainer has been admitted, or the file cannot be written.
        """
        self._check(lease_id)
        path = self._path / name
        temporary = layout.temporary_path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if start == 0:
                temporary.unlink(missing_ok=True)
                temporary.touch(0o600)
            with temporary.open("r+b") as file:
                file.seek(start)
                file.write(content)
            if is_last:
                sync_folder(temporary)
                temporary.replace(path)
                sync_folder(path.parent)
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error}") from error

    def delete(self, lease_id: str, names: Sequence[str]) -> None:
        """Deletes those files that are there."""
        self._check(lease_id)
        for name in names:
            path = self._path / name
            if path.is_file():
                path.unlink()
        for folder in sorted({(self._path / name).parent for name in names}, reverse=True):
            if folder != self._path and folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _check(self, lease_id: str) -> None:
        if lease_id != self._lease_id:
            raise StoreError(f"{self._path}: another trainer of the run has taken this one's place")


class HostedFiles:
    """The files of a hosted run folder; see :class:`RemoteFiles`. ``ray://LEASE`` is its URL."""

    def __init__(self, url: str) -> None:
        self._lease_id = url.removeprefix(f"{SCHEME}://")
        self._host: Any = ray.get_actor(ACTOR)
        self.url: str = self._call(self._host.describe)

    def list_names(self, folder: str = "") -> dict[str, int]:
        names: dict[str, int] = self._call(self._host.list_names, folder)
        return names

    def get(self, name: str, path: Path) -> bool:
        temporary, start = layout.temporary_path(path), 0
        temporary.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            while True:
                part = self._call(self._host.read, name, start, _PART_BYTES)
                if part is None:
                    temporary.unlink()
                    return False
                file.write(part)
                start += len(part)
                if len(part) < _PART_BYTES:
                    break
        temporary.replace(path)
        return True

    def put(self, name: str, path: Path) -> None:
        with path.open("rb") as file:
            start, part = 0, file.read(_PART_BYTES)
            while True:
                following = file.read(_PART_BYTES)
                self._call(self._host.write, self._lease_id, name, start, part, not following)
                if not following:
                    return
                start, part = start + len(part), following

    def delete(self, names: Sequence[str]) -> None:
        self._call(self._host.delete, self._lease_id, list(names))

    def read(self, name: str) -> TaggedContent | None:
        content = self._call(self._host.read, name, 0, _PART_BYTES)
        return None if content is None else TaggedContent(content, content.hex())

    def create(self, name: str, content: bytes) -> str | None:
        """Not here: the command takes the lock, and labels of evaluations."""
        raise NotImplementedError

    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        """Not here."""
        raise NotImplementedError

    def _call(self, method: Any, *given: Any) -> Any:
        try:
            return ray.get(method.remote(*given), timeout=_CALL_SECONDS)
        except StoreError:
            # As the host raised it: Ray's error of a task is an error of its cause's class too.
            raise
        except (RayError, GetTimeoutError) as error:
            raise UnreachableError(f"the command's machine does not answer: {error}") from error
