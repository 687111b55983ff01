"""Finished trajectories whose step is not complete yet: each on disk as soon as it ends.

A step's file is written when its last trajectory has ended. What ended before that, for this
step and for later ones that are sampled ahead, is kept here, so that a run that is killed does
not have to make it again.

One file a step, in JSON Lines: a line per trajectory, with the CRC-32 of its record. Nothing in
the file says how long anything is, so damage cannot be mistaken for a length, and each line
counts by itself. The first line that is incomplete or has another checksum (a torn write, or the
zeros that a power cut leaves) ends the file: it is cut there before anything is appended.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import append_whole, store_errors
from agentrl_cli.store.trajectory_file import format_record, parse_record

_log = get_logger(__name__)

_LINE = re.compile(rb'\{"crc32": (\d{1,10}), "trajectory": (.*)\}\n')
#: No trajectory comes near this: a longer line is damage, and is not read into memory.
_MAX_LINE_BYTES = 2**28


class PendingTrajectories:
    """The trajectories kept in ``folder``. Its methods may be called from any thread.

    They outlive this process. After a power cut some of the last may be missing, which does
    no harm: they are made again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}
        self._ids: set[str] = set()
        self._complete_steps: set[int] = set()
        self._lock = threading.Lock()

    def read(self, first_step: int) -> list[Trajectory]:
        """Those of steps from ``first_step`` on; files of earlier steps, now complete, are deleted.

        One that failed through its surroundings is not among them: it is made again, since what
        made it fail may have been what ended the run. For the process that holds the run folder
        alone: what is damaged is cut off.

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
                for trajectory in _read_and_mend(path):
                    if trajectory.failure is None or trajectory.is_policy_failure:
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
        """Keeps a trajectory, if it is not here already and its step is not complete.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        with self._lock:
            if trajectory.id in self._ids or trajectory.step in self._complete_steps:
                return
            record = format_record(trajectory)
            line = b'{"crc32": %d, "trajectory": %s}\n' % (zlib.crc32(record), record)
            append_whole(self._open(trajectory.step), line)
            self._ids.add(trajectory.id)

    def drop(self, step: int) -> None:
        """Deletes those of a step that is complete now."""
        with self._lock:
            self._complete_steps.add(step)
            file = self._files.pop(step, None)
            if file is not None:
                file.close()
            path = self._path(step)
            with store_errors(path, "deleted"):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files; what they hold stays."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _open(self, step: int) -> BinaryIO:
        if step not in self._files:
            path = self._path(step)
            if path.exists():
                _read_and_mend(path)
            with store_errors(path):
                self._folder.mkdir(parents=True, exist_ok=True)
                path.touch(0o600)
                self._files[step] = path.open("ab", buffering=0)
        return self._files[step]

    def _path(self, step: int) -> Path:
        return self._folder / f"{layout.step_name(step)}.jsonl"

    def _list_files(self) -> list[tuple[int, Path]]:
        """Step and path of every file, oldest first."""
        if not self._folder.is_dir():
            return []
        found = [(layout.parse_step(path.stem), path) for path in self._folder.glob("*.jsonl")]
        return sorted((step, path) for step, path in found if step is not None)


def _read_and_mend(path: Path) -> list[Trajectory]:
    """The trajectories up to the first damaged line, where the file ends from then on."""
    with store_errors(path, "read"), path.open("r+b") as file:
        trajectories = []
        end = 0
        for record in _read_records(file):
            try:
                trajectories.append(parse_record(record))
            except (KeyError, TypeError, ValueError):
                # Intact, but with the columns of another version of agentrl.
                break
            end = file.tell()
        size = file.seek(0, 2)
        if size > end:
            _log.warning(
                "%s: its last %d bytes are damaged (by a kill or a power cut) or were written by "
                "another version of agentrl: they are removed, and what they held is made again",
                path,
                size - end,
            )
            file.truncate(end)
    return trajectories


def _read_records(file: BinaryIO) -> Iterator[bytes]:
    while match := _LINE.fullmatch(file.readline(_MAX_LINE_BYTES)):
        if zlib.crc32(match[2]) != int(match[1]):
            return
        yield match[2]
