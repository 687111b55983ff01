"""Checkpoint folders: complete, or not there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_cli.store import layout
from agentrl_cli.store.files import store_errors, sync_folder, sync_tree


@contextmanager
def new_checkpoint(parent: Path, step: int) -> Iterator[Path]:
    """A folder to write into, which becomes ``step-000050`` when the block ends well.

    Raises:
        StoreError: the disk is full; earlier checkpoints are intact.
    """
    target = parent / layout.step_name(step)
    temporary = layout.temporary_path(target)
    try:
        with store_errors(target):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            sync_tree(temporary)
            replaced = layout.temporary_path(target, ".deleted")
            shutil.rmtree(replaced, ignore_errors=True)
            if target.exists():
                target.rename(replaced)
            temporary.rename(target)
            sync_folder(parent)
            shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def list_checkpoints(parent: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest step first."""
    if not parent.is_dir():
        return []
    found = [(layout.parse_step(p.name), p) for p in parent.iterdir() if p.is_dir()]
    return sorted((step, path) for step, path in found if step is not None)


def discard(folder: Path) -> None:
    """Deletes a folder, which is out of sight before the first of its files is gone."""
    doomed = layout.temporary_path(folder, ".deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def restore_replaced(parent: Path) -> None:
    """Brings back a checkpoint whose replacement was cut short between the two renames."""
    for doomed in parent.glob(".step-*.deleted"):
        target = parent / doomed.name.removeprefix(".").removesuffix(".deleted")
        replacement = layout.temporary_path(target)
        if replacement.exists() and not target.exists():
            doomed.rename(target)
