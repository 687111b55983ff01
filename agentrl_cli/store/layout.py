"""Names inside a run folder, from a name back to a step, and from what a user typed to a run."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError

CONFIG = "config.yaml"
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
#: Written with ``train.trace``.
TRACE = "trace.json"
TRAJECTORIES = "trajectories"
#: One file a step: what the trainer computed for its tokens before the update.
PROXIMAL_LOGPROBS = "proximal_logprobs"
#: Finished trajectories of steps that are not complete yet.
PENDING = "pending"
CHECKPOINTS = "checkpoints"
#: In the run's folder and in each checkpoint's: the next step, and what identifies the rows.
DATA_CURSOR = "data_cursor.json"
#: In a checkpoint's folder: the SHA-256 of each of its files.
CHECKSUMS = "checksums.json"
LOGS = "logs"
#: Written by the loggers of those names.
TENSORBOARD = "tensorboard"
WANDB = "wandb"
#: What loggers call the run: it tells a trial that was begun anew from one that was resumed.
LOGGER_RUN_ID = "logger_run_id.txt"
LOCK = ".lock"
#: Held by a trainer that is a process of its own, while its command holds ``LOCK``.
TRAINER_LOCK = ".lock-trainer"
#: Present while ``--overwrite`` deletes: the next start completes a deletion that was killed.
OVERWRITING = ".overwriting"

#: What belongs to agentrl in a run folder, and nothing else may be deleted from it.
OWNED = (
    METRICS, TRAJECTORIES, PROXIMAL_LOGPROBS, PENDING, CHECKPOINTS, LOGS, DATA_CURSOR, MANIFEST,
    CONFIG, TENSORBOARD, WANDB, LOGGER_RUN_ID, TRACE,
)  # fmt: skip

#: What grows beside the run, whoever writes it: logs, the folders of loggers, the trace.
GROWING = (LOGS, TENSORBOARD, WANDB, LOGGER_RUN_ID, TRACE)

#: Names with these endings are incomplete or being deleted: never read, removed at the next start.
TEMPORARY = (".tmp", ".deleted")

_MAX_LISTED = 8
_MAX_DEPTH = 4

_STEP = re.compile(r"^step-(\d+)(?:\.parquet)?$")
_EVAL = re.compile(r"^eval-(\d+)(?:-([A-Za-z0-9._\-]+))?\.json$")


#: Working copies that this process has, and the URLs of what they are copies of.
_COPIES: dict[Path, str] = {}


def run_dir_of(config: ExperimentConfig) -> str:
    """Where the run of ``config`` is, whether it exists or not: a folder, or a URL."""
    names = (config.experiment_name, config.trial_name)
    if is_url(config.output_dir):
        return "/".join((config.output_dir.rstrip("/"), *names))
    return str(Path(config.output_dir, *names))


def is_url(location: str) -> bool:
    """True for a place that is no folder of this machine."""
    return "://" in location


def name_copy(path: Path, url: str) -> None:
    """Lets :func:`describe` say ``url`` for ``path`` and what is below it."""
    _COPIES[path] = url


def describe(path: Path) -> str:
    """What a user calls ``path``: of a working copy, where it is a copy of."""
    for folder in (path, *path.parents):
        if folder in _COPIES:
            return "/".join((_COPIES[folder], *path.relative_to(folder).parts))
    return str(path)


def step_name(step: int) -> str:
    """``step-000012``: names sort as numbers do up to a million steps."""
    return f"step-{step:06d}"


def eval_name(step: int, label: str | None = None) -> str:
    """``eval-000020``, or ``eval-000020-label`` for an evaluation made beside the training."""
    return f"eval-{step:06d}" + (f"-{label}" if label else "")


def parse_label(label: str) -> str:
    """The label in the letters that a file name may have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-")


def parse_step(name: str) -> int | None:
    """The step of ``step-000012`` or ``step-000012.parquet``; None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def parse_eval(name: str) -> tuple[int, str | None] | None:
    """The step and label of ``eval-000020.json``; None for any other name."""
    match = _EVAL.match(name)
    return (int(match[1]), match[2]) if match else None


def temporary_path(path: Path, ending: str = ".tmp") -> Path:
    """Where ``path`` is written before it is complete: hidden, in the same folder."""
    return path.with_name(f".{path.name}{ending}")


def proximal_path(path: Path) -> Path:
    """Where the proximal logprobs are of the tokens in the trajectory file ``path``."""
    return path.parents[1] / PROXIMAL_LOGPROBS / path.name


def is_run_folder(path: Path) -> bool:
    """True where a run, or an evaluation, has written before."""
    return (path / CONFIG).is_file() or (path / TRAJECTORIES).is_dir()


def find_run_folder(path: Path) -> Path:
    """The run folder at ``path``, or around it when ``path`` lies inside one.

    Raises:
        RunFolderError: there is none; the message names the nearest.
    """
    for candidate in (path, *path.absolute().parents[:3]):
        if is_run_folder(candidate) and (path.exists() or candidate == path):
            return candidate
    problem = "is not a run folder" if path.exists() else "there is no such folder"
    raise RunFolderError(f"{path}: {problem}. {_format_nearest_runs(path)}")


def _format_nearest_runs(path: Path) -> str:
    """The runs below the nearest existing folder of ``path``, else below ``runs``."""
    around = path
    while not around.is_dir() and around != around.parent:
        around = around.parent
    # Never below the current folder itself, which may be as large as a home folder.
    roots = [Path("runs")] if around in (Path(), Path.cwd(), Path("/")) else [around, Path("runs")]
    found = ([str(p) for p in walk_runs(r) if os.access(p, os.R_OK | os.X_OK)] for r in roots)
    names = next(filter(None, found), [])
    if not names:
        return "A run folder is what agentrl train writes: runs/<experiment_name>/<trial_name>"
    near = difflib.get_close_matches(str(path), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}? " if near else ""
    more = ", ..." if len(names) > _MAX_LISTED else ""
    return f"{hint}There are: {', '.join(names[:_MAX_LISTED])}{more}"


def walk_runs(folder: Path, depth: int = _MAX_DEPTH) -> Iterator[Path]:
    """The run folders at and below ``folder``, and the folders that may not be looked into."""
    try:
        if is_run_folder(folder):
            yield folder
            return
        children = sorted(folder.iterdir()) if depth and folder.is_dir() else []
    except FileNotFoundError:
        return
    except OSError:
        yield folder
        return
    for child in children:
        if not child.name.startswith("."):
            yield from walk_runs(child, depth - 1)
