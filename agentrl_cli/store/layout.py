"""Names inside a run folder, and the way from a name back to a step."""

from __future__ import annotations

import re
from pathlib import Path

CONFIG = "config.yaml"
MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories"
#: Finished trajectories of steps that are not whole yet.
WAITING = "waiting"
CHECKPOINTS = "checkpoints"
#: Of the run, and of each checkpoint in its own folder: what the rows are known by.
DATA_CURSOR = "data_cursor.json"
LOGS = "logs"
#: Micro-batches whose loss or gradient was not finite.
MICRO_BATCHES = "micro-batches"
LOCK = ".lock"
#: Held by a trainer that is a process of its own, while its command holds ``LOCK``.
TRAINER_LOCK = ".lock-trainer"
#: Present while ``--overwrite`` deletes: a deletion that was killed is finished by the next start.
OVERWRITING = ".overwriting"

#: What belongs to agentrl in a run folder, and nothing else may be deleted from it.
OWNED = (
    METRICS, TRAJECTORIES, WAITING, CHECKPOINTS, MICRO_BATCHES, LOGS, DATA_CURSOR, MANIFEST, CONFIG,
)  # fmt: skip

#: Names that end so are unfinished, or on their way out: never read, removed at the next start.
TEMPORARY = (".tmp", ".deleted")

_STEP = re.compile(r"^step-(\d+)(?:\.parquet)?$")
_EVAL = re.compile(r"^eval-(\d+)(?:-([A-Za-z0-9._\-]+))?\.json$")


def step_name(step: int) -> str:
    """``step-000012``: names sort as numbers do up to a million steps."""
    return f"step-{step:06d}"


def eval_name(step: int, label: str | None = None) -> str:
    """``eval-000020``, or ``eval-000020-label`` for an evaluation made beside the training."""
    return f"eval-{step:06d}" + (f"-{label}" if label else "")


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


def is_run_folder(path: Path) -> bool:
    """True where a run, or an evaluation, has written before."""
    return (path / CONFIG).is_file() or (path / TRAJECTORIES).is_dir()


def is_being_emptied(path: Path) -> bool:
    """True where ``--overwrite`` was killed before it had deleted everything."""
    return (path / OVERWRITING).exists()
