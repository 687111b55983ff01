"""Checksums of a checkpoint's files: a flipped byte is found before it is trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_cli.errors import StoreError
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import atomic_folder, store_errors


@contextmanager
def checksummed_folder(path: Path) -> Iterator[Path]:
    """As ``atomic_folder``; the checksums of all files are written beside them."""
    with atomic_folder(path) as folder:
        yield folder
        text = json.dumps(_compute(folder), indent=2)
        (folder / layout.CHECKSUMS).write_text(text + "\n", encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Returns if every file is as it was written, or the folder has no checksums.

    Raises:
        StoreError: naming the files that are not.
    """
    path = folder / layout.CHECKSUMS
    if not path.is_file():
        return
    with store_errors(folder, "read"):
        try:
            written = dict(json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, ValueError):
            written = {layout.CHECKSUMS: "unreadable"}
        found = _compute(folder)
    changed = sorted(name for name, digest in written.items() if found.get(name) != digest)
    if changed:
        raise StoreError(
            f"the checkpoint {layout.describe(folder)} is damaged: {', '.join(changed[:8])} "
            "changed since it was "
            f"written. If you changed it yourself, delete {layout.describe(path)}. Else delete "
            "the folder and type "
            "the same command again: a run resumes from the checkpoint before it, or from the "
            "start, and learns from the stored trajectories, which are not sampled again"
        )


def _compute(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its name below the folder."""
    digests = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if name != layout.CHECKSUMS:
            with path.open("rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
