"""Where a run folder is, and where what is written into it lasts.

All else in this package writes and reads files of a local folder. That folder is either the run
folder itself, or a private copy of one on object storage, which begins empty: what was written is
pushed there, and what is read is fetched from there first. Only what is there counts.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentrl_cli.config.config_schema import STORAGE_SCHEMES, check_storage_location
from agentrl_cli.errors import RunFolderError, StoreError
from agentrl_cli.log import get_logger
from agentrl_cli.scratch_folders import ScratchFolder
from agentrl_cli.store import layout
from agentrl_cli.store.folder_lock import FolderLock, check_held_by
from agentrl_cli.store.remote import remote_files
from agentrl_cli.store.remote.lease import Lease
from agentrl_cli.store.remote.object_store import ObjectStore
from agentrl_cli.store.remote.remote_files import RemoteFiles, UnreachableError, format_away

ResultT = TypeVar("ResultT")

_log = get_logger(__name__)

#: What opens the URLs of each scheme.
BACKENDS: dict[str, Callable[[str], RemoteFiles]] = dict.fromkeys(STORAGE_SCHEMES, ObjectStore)

#: How long the trainer of a killed command, which is killed too, may take to end.
_ORPHAN_SECONDS = 20.0
#: How often what grows beside the run is pushed.
_GROWING_SECONDS = 30.0
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0


class FolderOwner(NamedTuple):
    """What a trainer must know of the command that holds its run folder."""

    pid: int
    location: str
    """Where the trainer finds it: a path or a URL."""
    lease_id: str = ""
    """On object storage; see ``lease.py``."""
    copy_dir: str = ""
    """The command's working copy, if it is on the trainer's machine: they write the same logs."""


class LocalFolder:
    """A run folder on this machine: what is written there lasts there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = layout.describe(path)
        self._locks: list[FolderLock] = []

    def has_sibling(self, name: str) -> bool:
        """True where there is a run of that name beside this one."""
        return self.path.with_name(name).exists()

    def is_run(self) -> bool:
        """True where a run, or an evaluation, has written before."""
        return layout.is_run_folder(self.path)

    def lock(self) -> None:
        """Holds it for this process alone, until :meth:`close`.

        Raises:
            RunFolderError: somebody else holds it.
        """
        lock = FolderLock(self.path / layout.LOCK)
        self._locks.append(lock)
        if (self.path / layout.TRAINER_LOCK).exists():
            FolderLock(self.path / layout.TRAINER_LOCK, wait_seconds=_ORPHAN_SECONDS).release()

    def join(self, owner: FolderOwner) -> None:
        """Works in it for the command that holds it, as its only trainer.

        Raises:
            RunFolderError: the folder is not held by that command, or another trainer works there.
        """
        check_held_by(self.path / layout.LOCK, owner.pid)
        path = self.path / layout.TRAINER_LOCK
        self._locks.append(FolderLock(path, wait_seconds=_ORPHAN_SECONDS))

    def name_owner(self, pid: int) -> FolderOwner:
        """What the trainers of the process ``pid``, which holds it, are told."""
        return FolderOwner(pid, str(self.path.absolute()))

    def admit_trainer(self) -> None:
        """Returns when the next trainer that joins is the only one that writes there.

        Raises:
            StoreError: the place does not answer, or another run has the folder.
        """

    def list_names(self, folder: str) -> list[str]:
        """The names of complete files and folders in ``folder``, a subfolder."""
        path = self.path / folder
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []

    def has(self, path: Path) -> bool:
        """True if there is a file ``path``, or anything in the folder ``path``."""
        return path.is_file() or (path.is_dir() and any(path.iterdir()))

    def claim(self, path: Path) -> bool:
        """Makes an empty file, unless there is one: then False."""
        try:
            path.touch(0o600, exist_ok=False)
        except FileExistsError:
            return False
        return True

    def fetch(self, path: Path) -> None:
        """Has the file ``path`` here, if there is one."""

    def refresh(self, path: Path) -> None:
        """As :meth:`fetch`, as new as it is there."""

    def fetch_folder(self, path: Path) -> None:
        """Has all that is in the folder ``path`` here."""

    def push(self, path: Path) -> None:
        """Returns when the file, or all in the folder, lasts as it is now.

        Raises:
            StoreError: it cannot be kept.
        """

    def move(self, path: Path) -> None:
        """As :meth:`push`, but whoever reads it fetches it again: copies need no room for it."""

    def delete(self, *paths: Path) -> None:
        """Deletes files and folders, if they are there."""
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                # It disappears before the first of its files does.
                path = path.rename(layout.temporary_path(path, ".deleted"))
            _delete(path)

    def remove_temporaries(self) -> None:
        """Deletes what was not complete when a process was killed."""
        names = layout.TRAJECTORIES, layout.PROXIMAL_LOGPROBS, layout.PENDING, layout.CHECKPOINTS
        for folder in (self.path, *(self.path / name for name in names)):
            for entry in folder.glob(".*"):
                if entry.name.endswith(layout.TEMPORARY):
                    _delete(entry)

    def share_logs(self) -> None:
        """Has the logs of earlier starts here, and what is added to them last, soon."""

    def close(self) -> None:
        """Lets others hold it; may be called twice."""
        for lock in self._locks:
            lock.release()


class WorkingCopy(LocalFolder):
    """A private copy of a run folder that is elsewhere.

    Args:
        files: the run folder.
        copy_dir: the copy of the command that holds it, which pushes the logs in it; empty: a new
            one is made.
    """

    def __init__(self, files: RemoteFiles, copy_dir: str = "") -> None:
        self._scratch = None if copy_dir else ScratchFolder("run")
        path = Path(copy_dir) if self._scratch is None else self._scratch.path / "run"
        path.mkdir(mode=0o700, exist_ok=True)
        layout.name_copy(path, files.url)
        super().__init__(path)
        self._files = files
        self._lease: Lease | None = None
        self._has_given_up = False
        self._closed = threading.Event()
        self._pusher = threading.Thread(target=self._keep_pushing, name="agentrl-logs", daemon=True)
        #: Size and time of change of what grows, as it was pushed or fetched last.
        self._pushed: dict[Path, tuple[int, int]] = {}
        if self._scratch is None:
            # What a killed trainer has left; what is not in the run folder does not count.
            super().delete(*(p for p in path.iterdir() if p.name not in layout.GROWING))

    def has_sibling(self, name: str) -> bool:
        return open_location(f"{self.location.rpartition('/')[0]}/{name}").is_run()

    def is_run(self) -> bool:
        return any(self.has(self.path / name) for name in (layout.CONFIG, layout.TRAJECTORIES))

    def lock(self) -> None:
        self._lease = Lease.take(self._files)

    def join(self, owner: FolderOwner) -> None:
        self._lease = Lease.join(self._files, owner.lease_id)

    def name_owner(self, pid: int) -> FolderOwner:
        assert self._lease is not None
        return FolderOwner(pid, self.location, self._lease.id, str(self.path))

    def admit_trainer(self) -> None:
        assert self._lease is not None
        self._call(self._lease.admit_trainer)

    def list_names(self, folder: str) -> list[str]:
        found = [name.split("/")[1:] for name in self._call(self._files.list_names, folder)]
        # The checksums of a checkpoint are pushed last, and deleted first.
        return sorted(path[0] for path in found if path[1:] in ([], [layout.CHECKSUMS]))

    def has(self, path: Path) -> bool:
        name = self._name(path)
        return self._call(self._files.read, name) is not None or bool(
            self._call(self._files.list_names, name)
        )

    def claim(self, path: Path) -> bool:
        return self._call(self._files.create, self._name(path), b"") is not None

    def fetch(self, path: Path) -> None:
        if not path.exists():
            self.refresh(path)

    def refresh(self, path: Path) -> None:
        self._call(self._files.get, self._name(path), path)

    def fetch_folder(self, path: Path) -> None:
        for name in self._call(self._files.list_names, self._name(path)):
            self.fetch(self.path / name)

    def push(self, path: Path) -> None:
        if path.is_dir():
            self._delete_names(path)
        for file in _list_files(path):
            self._call(self._files.put, self._name(file), file)

    def move(self, path: Path) -> None:
        self.push(path)
        super().delete(path)

    def delete(self, *paths: Path) -> None:
        self._delete_names(*paths)
        super().delete(*paths)

    def _delete_names(self, *paths: Path) -> None:
        names = [self._name(path) for path in paths]
        below = [n for name in names for n in self._call(self._files.list_names, name)]
        checksums = [name for name in below if name.endswith(f"/{layout.CHECKSUMS}")]
        for some in (checksums, names + below):
            if some:
                self._call(self._files.delete, some)

    def remove_temporaries(self) -> None:
        super().remove_temporaries()
        names = self._call(self._files.list_names, layout.TRAJECTORIES)
        self.delete(*(self.path / name for name in names if name.endswith(layout.TEMPORARY)))

    def share_logs(self) -> None:
        self.fetch_folder(self.path / layout.LOGS)
        self.fetch(self.path / layout.LOGGER_RUN_ID)
        self._pushed = dict(self._list_growing())
        self._pusher.start()

    def _list_growing(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for file in (f for name in layout.GROWING for f in _list_files(self.path / name)):
            # Loggers delete files, too.
            with suppress(FileNotFoundError):
                yield file, (file.stat().st_size, file.stat().st_mtime_ns)

    def _keep_pushing(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(_GROWING_SECONDS)
            for file, state in self._list_growing():
                if self._pushed.get(file) == state:
                    continue
                try:
                    self.push(file)
                    self._pushed[file] = state
                except (StoreError, OSError) as error:
                    _log.warning("%s is not stored yet: %s", layout.describe(file), error)
                    break

    def close(self) -> None:
        self._closed.set()
        if self._pusher.ident is not None:
            self._pusher.join()
        if self._lease is not None:
            self._lease.release()
        if self._scratch is not None:
            self._scratch.close()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _call(self, work: Callable[..., ResultT], *given: Any) -> ResultT:
        """What the work gives, tried again for a while where the place does not answer.

        Raises:
            StoreError: it does not, or another run has the folder.
        """
        give_up_at = time.monotonic() + remote_files.PATIENCE_SECONDS
        pause_seconds = _FIRST_PAUSE_SECONDS
        while True:
            try:
                if self._lease is not None:
                    self._lease.check()
                result = work(*given)
                self._has_given_up = False
                return result
            except UnreachableError as error:
                # Whoever has waited in vain has waited for all.
                is_last = self._has_given_up or self._closed.is_set()
                if is_last or time.monotonic() + pause_seconds > give_up_at:
                    self._has_given_up = True
                    raise StoreError(format_away(error)) from error
            self._closed.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)


def open_location(location: str | Path, copy_dir: str = "") -> LocalFolder:
    """The run folder at a path or URL, whether it exists or not.

    Raises:
        UserInputError: the URL's scheme is unknown, or the place cannot be used.
    """
    if not layout.is_url(str(location)):
        return LocalFolder(Path(location))
    scheme = str(location).partition("://")[0]
    if scheme not in BACKENDS:
        try:
            check_storage_location(str(location))
        except ValueError as error:
            raise RunFolderError(str(error)) from None
    return WorkingCopy(BACKENDS[scheme](str(location)), copy_dir)


def find_run(location: str | Path) -> LocalFolder:
    """The run folder at ``location``, or around it when that lies inside one.

    Raises:
        RunFolderError: there is none; the message names the nearest.
    """
    if not layout.is_url(str(location)):
        return open_location(layout.find_run_folder(Path(location)))
    url = str(location).rstrip("/")
    # Not the bucket, nor what is above it.
    for _ in range(min(4, url.count("/") - 2)):
        place = open_location(url)
        if place.is_run():
            return place
        url = url.rpartition("/")[0]
    raise RunFolderError(
        f"{location}: is not a run folder. A run folder is what agentrl train writes: "
        "<output_dir>/<experiment_name>/<trial_name>"
    )


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _list_files(path: Path) -> list[Path]:
    """The file, or those in the folder: a checkpoint's checksums last."""
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    files = [file for file in found if file.is_file() and not file.is_symlink()]
    return sorted(files, key=lambda file: (file.name == layout.CHECKSUMS, file))
