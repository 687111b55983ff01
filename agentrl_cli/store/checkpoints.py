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
    """Deletes a folder, which is out of sight before the first of its files is gone."""
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
    # Without its replacement beside it, it is on its way out and no longer whole.
    if replaced.exists() and replacement.exists() and not target.exists():
        replaced.rename(target)
