"""Finished trajectories whose step is not whole yet: each on disk as soon as it ends.

A step's file is written when its last trajectory has ended. What ended before that, for this
step and for later ones that are sampled ahead, waits here, so that a run which is killed does
not make it again.

One file a step and start of the run. It is a row of frames (length, checksum, content): the
schema, then one record batch a trajectory. A frame that a kill cut short ends the file.
"""

from __future__ import annotations

import re
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from agentrl_cli.records import Trajectory
from agentrl_cli.store import layout, schema
from agentrl_cli.store.files import store_errors

#: Length in bytes and CRC-32 of what follows.
_FRAME = struct.Struct("<QI")
_NAME = re.compile(r"^(step-\d+)\.(\d+)\.arrows$")


class WaitingTrajectories:
    """The trajectories that wait in ``folder``. Its methods may be called from any thread.

    They outlive this process. After a power cut some of the last may be missing, which is
    no harm: they are made again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._ids: set[str] = set()
        self._whole_steps: set[int] = set()
        self._lock = threading.Lock()

    def read(self, first_step: int) -> list[Trajectory]:
        """Those of steps from ``first_step`` on; files of earlier steps, which are whole, go.

        One that failed is not among them: it is made again, since what made it fail may have
        been what ended the run.

        Raises:
            StoreError: a file cannot be read.
        """
        found: dict[str, Trajectory] = {}
        with self._lock:
            for step, path in self._list_files():
                if step < first_step:
                    with store_errors(path, "deleted"):
                        path.unlink()
                    continue
                for trajectory in _read_file(path):
                    if trajectory.failure is None:
                        found[trajectory.id] = trajectory
            self._ids = set(found)
        return list(found.values())

    def discard(self) -> None:
        """Deletes all of them.

        Raises:
            StoreError: a file cannot be deleted.
        """
        self.close()
        with self._lock:
            self._ids.clear()
            for _, path in self._list_files():
                with store_errors(path, "deleted"):
                    path.unlink()

    def add(self, trajectory: Trajectory) -> None:
        """Keeps a trajectory, if it is not here already and its step is not whole.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        with self._lock:
            if trajectory.id in self._ids or trajectory.step in self._whole_steps:
                return
            file = self._open(trajectory.step)
            table = pa.RecordBatch.from_pylist([schema.to_row(trajectory)], schema=schema.SCHEMA)
            _append(file, table.serialize(), Path(file.name))
            self._ids.add(trajectory.id)

    def drop(self, step: int) -> None:
        """Deletes those of a step, which is whole now."""
        with self._lock:
            self._whole_steps.add(step)
            file = self._files.pop(step, None)
            if file is not None:
                file.close()
            for number, path in self._list_files():
                if number == step:
                    with store_errors(path, "deleted"):
                        path.unlink()

    def close(self) -> None:
        """Closes the files; what they hold stays."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, step: int) -> BinaryIO:
        file = self._files.get(step)
        if file is not None:
            return file
        numbers = [
            int(match[2])
            for number, path in self._list_files()
            if number == step and (match := _NAME.match(path.name))
        ]
        path = self._folder / f"{layout.step_name(step)}.{max(numbers, default=0) + 1}.arrows"
        with store_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            file = path.open("xb", buffering=0)
        try:
            _append(file, schema.SCHEMA.serialize(), path)
        except BaseException:
            # Nothing that stands in it would be found: the next one begins another file.
            file.close()
            raise
        self._files[step] = file
        return file

    def _list_files(self) -> list[tuple[int, Path]]:
        """Step and path of every file, oldest first."""
        if not self._folder.is_dir():
            return []
        found = []
        for path in self._folder.iterdir():
            match = _NAME.match(path.name)
            step = layout.parse_step(match[1]) if match else None
            if match and step is not None:
                found.append((step, int(match[2]), path))
        return [(step, path) for step, _, path in sorted(found)]


def _append(file: BinaryIO, content: Any, path: Path) -> None:
    frame = b"".join((_FRAME.pack(len(content), zlib.crc32(content)), memoryview(content)))
    with store_errors(path):
        size = file.tell()
        try:
            written = 0
            while written < len(frame):
                written += file.write(frame[written:])
        except OSError:
            # A later frame would stand behind a torn one, where nobody looks for it.
            with suppress(OSError):
                file.truncate(size)
                file.seek(size)
            raise


def _read_file(path: Path) -> Iterator[Trajectory]:
    with store_errors(path, "read"), path.open("rb") as file:
        frames = _read_frames(file)
        described = next(frames, None)
        # Another version's columns: what waits is made again.
        if described is None or described != schema.SCHEMA.serialize().to_pybytes():
            return
        for frame in frames:
            batch = pa.ipc.read_record_batch(pa.py_buffer(frame), schema.SCHEMA)
            yield from (schema.from_row(row) for row in batch.to_pylist())


def _read_frames(file: BinaryIO) -> Iterator[bytes]:
    """The whole frames of a file, up to the first that is not."""
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        content = file.read(length)
        if len(content) != length or zlib.crc32(content) != checksum:
            return
        yield content
