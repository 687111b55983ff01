"""Writing that is complete or did not happen, and errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from agentrl_cli.errors import StoreError
from agentrl_cli.store.layout import temporary_path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def store_errors(path: Path, action: str = "written") -> Iterator[None]:
    """Turns what the system raises while ``path`` is written or read into a StoreError.

    Libraries that write by themselves (safetensors, tokenizers) wrap it in exceptions of
    their own, so the texts of these are looked at too.
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
            "again: the run goes on from its last checkpoint. (A lower "
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
    """A file to write into; ``path`` appears, whole and on disk, when the block ends well.

    Raises:
        StoreError: the system refused; ``path`` is then as it was before.
    """
    temporary = temporary_path(path)
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
    """Makes every file below ``path``, and the names of them, survive a power cut."""
    for folder, _, names in os.walk(path):
        for name in names:
            descriptor = os.open(Path(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(folder))
