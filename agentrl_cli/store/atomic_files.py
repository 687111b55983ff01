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
        advice = ""
        if is_full_disk(error):
            advice = (
                ". The disk (or your quota) is full. Everything written before is intact. Free "
                "some space, then type the same command again: the run resumes from its last "
                "checkpoint. (A lower train.keep_last_checkpoints, or output_dir=FOLDER on a "
                "larger disk, needs less.)"
            )
        elif _is_one_of(error, _REFUSED):
            advice = (
                ". Allowed: a folder that you may write to. Type output_dir=FOLDER, or correct "
                "its permissions"
            )
        elif not isinstance(error, OSError | SafetensorError):
            raise
        raise StoreError(f"{layout.describe(path)}: cannot be {action}: {error}{advice}") from error


def is_full_disk(error: Exception) -> bool:
    """True for a full disk, quota or file, also where a library has wrapped it."""
    return _is_one_of(error, _FULL)


def _is_one_of(error: Exception, numbers: Collection[int]) -> bool:
    text = str(error).lower()
    return getattr(error, "errno", None) in numbers or any(
        os.strerror(number).lower() in text for number in numbers
    )


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
            # What agents and tools say is for the user alone.
            temporary.touch(0o600)
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


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` so that ``path`` holds either all of it or what it held before."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; it becomes ``path``, which must not exist, when the block ends well.

    Raises:
        StoreError: the system refused; nothing is left.
    """
    temporary = layout.temporary_path(path)
    try:
        with store_errors(path):
            temporary.mkdir(parents=True)
            yield temporary
            sync_tree(temporary)
            temporary.rename(path)
            sync_folder(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
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


def sync_folder(path: Path) -> None:
    """Makes renames inside ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Makes every file below ``path``, and its name, survive a power cut."""
    for entry in (*path.rglob("*"), path):
        # Files are opened and flushed in the same way.
        sync_folder(entry)
