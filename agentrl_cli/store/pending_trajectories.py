"""Finished trajectories that are in no step's file yet: each on disk as soon as it ends.

A step's file is written while the step is trained on, from trajectories that ended long before.
What ended is kept here until that file is complete, so that a run that is killed does not have to
make it again; and which trajectories a step is made of, so that it learns from the same ones. A
group goes into one step, whole.

A file holds one group in JSON Lines: a line per trajectory, with the CRC-32 of its record. Nothing
in it says how long anything is, so damage cannot be mistaken for a length, and each line counts by
itself. The first line that is incomplete or has another checksum (a torn write, or the zeros that a
power cut leaves) ends the file: it is cut there before anything is appended. ``batch-000012.json``
lists a step's trajectories, from before it is trained on until its file is written.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote

from agentrl_cli.errors import StoreError
from agentrl_cli.log import get_logger
from agentrl_cli.records import Trajectory
from agentrl_cli.store.atomic_files import append_whole, store_errors, write_text
from agentrl_cli.store.trajectory_record import format_record, parse_record
from agentrl_cli.store.trajectory_summary import OpenRounds, parse_open_rounds
from agentrl_cli.store.working_copy import LocalFolder

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

_LINE = re.compile(rb'\{"crc32": (\d{1,10}), "trajectory": (.*)\}\n')
#: No trajectory comes near this: a longer line is damage, and is not read into memory.
_MAX_LINE_BYTES = 2**28


class PendingTrajectories:
    """The trajectories kept in ``folder``. Its methods may be called from any thread.

    They outlive this process. After a power cut some of the last may be missing, which does
    no harm: they are made again. All writing is done by a thread of its own, in the order of the
    calls: whoever finishes a trajectory is an event loop with others to attend to.
    """

    def __init__(self, folder: Path, place: LocalFolder | None = None) -> None:
        self._folder = folder
        self._place = place or LocalFolder(folder.parent)
        #: Used by that thread alone.
        self._ids: set[str] = set()
        self._mended: set[Path] = set()
        #: Groups with lines that were not pushed yet.
        self._changed: set[Path] = set()
        self._error: StoreError | None = None
        self._writer = ThreadPoolExecutor(1, "agentrl-pending")
        self._last: Future[None] | None = None

    def add(self, trajectory: Trajectory) -> None:
        """Keeps a trajectory soon, if it is not here already.

        Raises:
            StoreError: an earlier one could not be kept.
        """
        self._raise_error()
        self._last = self._writer.submit(self._add_noting_error, trajectory)

    def flush(self) -> None:
        """Returns when all that was added is kept.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        if self._last is not None:
            # One thread does one after the other.
            wait([self._last])
        if self._changed:
            self._do(self._push)
        self._raise_error()

    def commit(
        self, step: int, trajectories: Sequence[Trajectory], open_rounds: OpenRounds
    ) -> None:
        """Notes that ``step`` is made of these: from now on :meth:`restore` gives them.

        Raises:
            StoreError: the disk is full, or the folder cannot be written to.
        """
        self._do(self._commit, step, trajectories, open_rounds)
        self._raise_error()

    def drop(self, step: int, trajectories: Iterable[Trajectory]) -> None:
        """Deletes a step's trajectories, which are in a file of their own now.

        Raises:
            StoreError: a file cannot be deleted.
        """
        self._do(self._drop, step, [*trajectories])

    def restore(self, write: Callable[[int, list[Trajectory], OpenRounds], object]) -> None:
        """Has the steps written that were committed when the run was interrupted, and drops them.

        For the process that holds the run folder alone, as :meth:`read`.

        Raises:
            StoreError: a file cannot be read, written or deleted.
        """
        for path in sorted(self._folder.glob("batch-*.json")):
            found = _read_batch(path)
            if found is None:
                _log.warning(
                    "%s: some of its trajectories are damaged (by a power cut): the step is made "
                    "again, from those that are not",
                    path,
                )
                with store_errors(path, "deleted"):
                    self._place.delete(path)
                continue
            step, trajectories, open_rounds = found
            write(step, trajectories, open_rounds)
            self.drop(step, trajectories)

    def read(self) -> list[Trajectory]:
        """All that are kept, group by group.

        One that failed through its surroundings is not among them: it is made again, since what
        made it fail may have been what ended the run. For the process that holds the run folder
        alone: what is damaged is cut off.

        Raises:
            StoreError: a file cannot be read.
        """
        return self._do(self._read)

    def discard(self) -> None:
        """Deletes all of them.

        Raises:
            StoreError: a file cannot be deleted.
        """
        self._do(self._discard)

    def close(self) -> None:
        """Ends the thread when all is written; what is kept stays."""
        with suppress(RuntimeError):  # It was closed before.
            self._do(self._push_soon)
        self._writer.shutdown()

    def _do(self, work: Callable[..., ResultT], *given: Any) -> ResultT:
        """The result of work in the thread, after all that it was given before."""
        return self._writer.submit(work, *given).result()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _add_noting_error(self, trajectory: Trajectory) -> None:
        try:
            self._add(trajectory)
            # Behind what waits by now: a group is pushed once for all that was added meanwhile.
            if len(self._changed) == 1:
                self._writer.submit(self._push_soon)
        except StoreError as error:
            self._error = error

    def _push_soon(self) -> None:
        try:
            self._push()
        except StoreError as error:
            # They are in the copy: whoever needs them elsewhere tries again.
            _log.warning("%s", error)

    def _push(self) -> None:
        for path in [*self._changed]:
            self._place.push(path)
            self._changed.discard(path)

    def _add(self, trajectory: Trajectory) -> None:
        if trajectory.id in self._ids:
            return
        path = self._path(trajectory)
        if path not in self._mended and path.exists():
            _read_group(path, mend=True)
        self._mended.add(path)
        record = format_record(trajectory)
        with store_errors(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            with path.open("ab", buffering=0) as file:
                crc = zlib.crc32(record)
                append_whole(file, b'{"crc32": %d, "trajectory": %s}\n' % (crc, record))
        self._ids.add(trajectory.id)
        self._changed.add(path)

    def _commit(
        self, step: int, trajectories: Sequence[Trajectory], open_rounds: OpenRounds
    ) -> None:
        for trajectory in trajectories:
            self._add(trajectory)
        self._push()
        batch = {
            "step": step,
            "groups": [*dict.fromkeys(self._path(t).name for t in trajectories)],
            "trajectories": [[t.id, t.replaced_by] for t in trajectories],
            "open_rounds": open_rounds,
        }
        write_text(self._batch_path(step), json.dumps(batch) + "\n")
        self._place.push(self._batch_path(step))

    def _drop(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        self._ids.difference_update(t.id for t in trajectories)
        groups = [*dict.fromkeys(map(self._path, trajectories))]
        self._mended.difference_update(groups)
        self._changed.difference_update(groups)
        with store_errors(self._batch_path(step), "deleted"):
            self._place.delete(*groups)
            # It goes last: while it is there, its step is written again.
            self._place.delete(self._batch_path(step))

    def _read(self) -> list[Trajectory]:
        found = {
            t.id: t for path in self._list_groups() for t in _read_group(path, mend=True).values()
        }
        kept = [t for t in found.values() if t.failure is None or t.is_policy_failure]
        self._ids = {t.id for t in kept}
        return kept

    def _discard(self) -> None:
        self._ids.clear()
        self._mended.clear()
        self._changed.clear()
        with store_errors(self._folder, "deleted"):
            self._place.delete(*self._list_groups(), *self._folder.glob("batch-*.json"))

    def _path(self, trajectory: Trajectory) -> Path:
        # A name of any letters becomes that of a file.
        return self._folder / f"{quote(trajectory.group_id, safe='')}.jsonl"

    def _batch_path(self, step: int) -> Path:
        return self._folder / f"batch-{step:06d}.json"

    def _list_groups(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl"))


def _read_batch(path: Path) -> tuple[int, list[Trajectory], OpenRounds] | None:
    """Step, trajectories and open rounds of a committed batch; None: some are damaged."""
    with store_errors(path, "read"):
        batch = json.loads(path.read_text(encoding="utf-8"))
    kept: dict[str, Trajectory] = {}
    for name in batch["groups"]:
        group = path.with_name(name)
        if group.exists():
            kept |= _read_group(group)
    step: int = batch["step"]
    try:
        found = [(kept[name], replaced_by) for name, replaced_by in batch["trajectories"]]
    except KeyError:
        return None
    trajectories = [replace(t, step=step, replaced_by=other) for t, other in found]
    return step, trajectories, parse_open_rounds(batch["open_rounds"])


def _read_group(path: Path, *, mend: bool = False) -> dict[str, Trajectory]:
    """The trajectories up to the first damaged line, by id: the latest of each; with ``mend`` the
    file ends there from then on."""
    with store_errors(path, "read"), path.open("r+b" if mend else "rb") as file:
        trajectories = {}
        end = 0
        for record in _read_records(file):
            try:
                trajectory = parse_record(record)
            except (KeyError, TypeError, ValueError):
                # Intact, but with the columns of another version of agentrl.
                break
            trajectories[trajectory.id] = trajectory
            end = file.tell()
        size = file.seek(0, 2)
        if mend and size > end:
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
