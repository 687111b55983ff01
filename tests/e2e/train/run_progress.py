"""How far a run is, what it has learned, and the processes of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil

from agentrl_cli.store.remote.object_store import ObjectStore
from agentrl_cli.store.run_folder import RunFolder

_PROGRAM = "agentrl_cli.launch.processes.trainer_program"
_METRICS = ("loss", "grad_norm", "reward_mean", "completion_tokens_mean")


def count_steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def count_stored_steps(url: str) -> int:
    found = ObjectStore(url).read("metrics.jsonl")
    return 0 if found is None else len(found.content.splitlines())


def download(url: str, folder: Path) -> Path:
    files = ObjectStore(url)
    for name in files.list_names():
        files.get(name, folder / name)
    return folder


def read_losses(location: Path | str) -> list[list[float]]:
    """What tells runs apart that have learned from other trajectories, by step."""
    return [[line[name] for name in _METRICS] for line in RunFolder.open(location).read_metrics()]


def find_rank(processes: Iterable[psutil.Process], index: int) -> psutil.Process | None:
    """The process of a rank, not the process reaper before it."""
    for process in processes:
        try:
            is_rank = process.cmdline()[2:3] == [_PROGRAM]
            if is_rank and process.environ()["RANK"] == str(index):
                return process
        except psutil.Error:
            continue
    return None
