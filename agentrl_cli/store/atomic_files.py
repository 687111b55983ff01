"""Files and folders that are complete or not there, and errors that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from agentrl_cli.errors import StoreError
from agentrl_cli.store import layout

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def store_errors(path: Path, action: str = "written") -> Iterator[None]:
    """Turns what the system raises while ``path`` is written or read into a StoreError.

    Libraries that write files themselves (safetensors, tokenizers) wrap it in exceptions of
    their own, so their messages are examined too.
    """
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        is_known = isinstance(error, OSError | SafetensorError)
        if not is_known and not _is_one_of(error, _FULL | _REFUSED):
            raise
        raise StoreError(_describe(path, action, error)) from error


def is_full_disk(error: Exception) -> bool:
    """True for a full disk, quota or file, also where a library has wrapped it."""
    return _is_one_of(error, _FULL)


def _is_one_of(error: Exception, numbers: Collection[int]) -> bool:
    text = str(error).lower()
    return getattr(error, "errno", None) in numbers or any(
        os.strerror(number).lower() in text for number in numbers
    )


def _describe(path: Path, action: str, error: Exception) -> str:
    if is_full_disk(error):
        return (
            f"{path}: cannot be {action}: {error}. The disk (or your quota) is full. "
            "Everything written before is intact. Free some space, then type the same command "
            "again: the run resumes from its last checkpoint. (A lower "
            "train.keep_last_checkpoints, or output_dir=FOLDER on a larger disk, needs less.)"
        )
    if _is_one_of(error, _REFUSED):
        return (
            f"{path}: cannot be {action}: {error.__class__.__name__}: {error}. Allowed: a folder "
            "that you may write to. Type output_dir=FOLDER, or correct its permissions"
        )
    return f"{path}: cannot be {action}: {error}"


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into; ``path`` appears, complete and on disk, when the block ends well.

    Raises:
        StoreError: the system refused; ``path`` is then as it was before.
    """
    temporary = layout.temporary_path(path)
    try:
        with store_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def append_whole(file: BinaryIO, content: bytes) -> None:
    """Writes ``content`` to the end of an unbuffered file; if it does not fit, none of it stays.

    Raises:
        StoreError: the disk is full, or the file cannot be written to.
    """
    with store_errors(Path(file.name)):
        size = os.fstat(file.fileno()).st_size
        try:
            written = 0
            while written < len(content):
                written += file.write(content[written:])
        except OSError:
            # What is appended later would be behind a torn line, where nobody looks for it.
            with suppress(OSError):
                file.truncate(size)
            raise


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` so that ``path`` holds either all of it or what it held before."""
    with atomic_file(path) as file:
        file.write(text.encode())


def sync_folder(path: Path) -> None:
    """Makes renames inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes every file below ``path``, and its name, survive a power cut."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))


@contextmanager
def new_checkpoint(parent: Path, step: int) -> Iterator[Path]:
    """A folder to write into, which becomes ``step-000050`` when the block ends without an error.

    Raises:
        StoreError: the disk is full; earlier checkpoints are intact.
    """
    target = parent / layout.step_name(step)
    temporary = layout.temporary_path(target)
    replaced = layout.temporary_path(target, ".deleted")
    try:
        with store_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            sync_tree(temporary)
            shutil.rmtree(replaced, ignore_errors=True)
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync_folder(parent)
    except BaseException:
        _bring_back(replaced, target, temporary)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest step first."""
    if not parent.is_dir():
        return []
    found = [(layout.parse_step(p.name), p) for p in parent.iterdir() if p.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def discard(folder: Path) -> None:
    """Deletes a folder; it disappears before the first of its files does."""
    doomed = layout.temporary_path(folder, ".deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def restore_replaced(parent: Path) -> None:
    """Brings back a checkpoint whose replacement was cut short between the two renames."""
    for doomed in parent.glob(".step-*.deleted"):
        target = parent / doomed.name.removeprefix(".").removesuffix(".deleted")
        _bring_back(doomed, target, layout.temporary_path(target))


def _bring_back(replaced: Path, target: Path, replacement: Path) -> None:
    # Without its replacement beside it, it is being deleted and no longer complete.
    if replaced.exists() and replacement.exists() and not target.exists():
        replaced.rename(target)
