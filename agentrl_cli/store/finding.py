"""From what a user typed to a run folder, or to the names of those that exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from agentrl_cli.errors import RunFolderError
from agentrl_cli.store import layout

_MAX_LISTED = 8
_MAX_DEPTH = 4


def find_run_folder(path: Path) -> Path:
    """The run folder at ``path``, or around it when ``path`` lies inside one.

    Raises:
        RunFolderError: there is none; the message names the nearest.
    """
    for candidate in (path, *path.absolute().parents[:3]):
        if layout.is_run_folder(candidate) and (path.exists() or candidate == path):
            return candidate
    problem = "is not a run folder" if path.exists() else "there is no such folder"
    raise RunFolderError(f"{path}: {problem}. {_format_nearest_runs(path)}")


def list_run_folders(root: Path, depth: int = _MAX_DEPTH) -> list[Path]:
    """The run folders below ``root``."""
    return list(_walk(root, depth))


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    if layout.is_run_folder(folder):
        yield folder
        return
    if depth == 0:
        return
    try:
        children = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:
        # A folder that may not be read has no runs to offer.
        return
    for child in children:
        yield from _walk(child, depth - 1)


def _format_nearest_runs(path: Path) -> str:
    """The runs below the nearest existing folder of ``path``, else below ``runs``."""
    around = path
    while not around.is_dir() and around != around.parent:
        around = around.parent
    # Never below the current folder itself, which may be as large as a home folder.
    roots = [Path("runs")] if around in (Path(), Path.cwd(), Path("/")) else [around, Path("runs")]
    found = next((f for f in map(list_run_folders, roots) if f), [])
    if not found:
        return "A run folder is what agentrl train writes: runs/<experiment_name>/<trial_name>"
    names = [str(p) for p in found]
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f"{hint}There are: {', '.join(names[:_MAX_LISTED])}{more}"
