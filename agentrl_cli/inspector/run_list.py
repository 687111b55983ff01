"""The runs below a folder, the newest first."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentrl_cli.errors import RunFolderError
from agentrl_cli.inspector.json_view import to_strict
from agentrl_cli.store.layout import is_url, walk_runs
from agentrl_cli.store.run_outline import RunOutline, read_outline

#: ``project/runs/experiment/trial``, seen from the project.
_MAX_DEPTH = 3


def list_runs(location: str) -> list[RunOutline]:
    """The runs of a folder that holds experiments, of an experiment's folder, or the run at it.

    Raises:
        RunFolderError: ``location`` is a URL, or no folder.
    """
    if is_url(location):
        raise RunFolderError(
            f"{location}: agentrl runs lists folders of this machine, and this is a URL. Name one "
            f"run of it:  agentrl inspect-trajectories {location.rstrip('/')}/EXPERIMENT/TRIAL"
        )
    folder = Path(location)
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "there is no such folder"
        raise RunFolderError(
            f"{folder}: {problem}. Type  agentrl runs DIR  with the folder of your runs "
            "(output_dir in the configuration; runs if it is not set)"
        )
    outlines = map(read_outline, walk_runs(folder, _MAX_DEPTH))
    return sorted(outlines, key=lambda run: run.last_activity or 0.0, reverse=True)


def name_run(run: RunOutline) -> str:
    """``experiment/trial``."""
    return "/".join(run.path.absolute().parts[-2:])


def find_last_reward(run: RunOutline) -> float | None:
    """The mean reward of the last step that has one."""
    return next((r for r in reversed(run.rewards) if math.isfinite(r)), None)


def format_runs(location: str, runs: list[RunOutline]) -> str:
    """``{"dir", "runs": [...]}``, strict JSON in ASCII."""
    data = {"dir": location, "runs": [_describe(run) for run in runs]}
    return json.dumps(to_strict(data), indent=2, allow_nan=False)


def _describe(run: RunOutline) -> dict[str, Any]:
    latest, moment = run.latest_eval, run.last_activity
    return {
        "run": name_run(run),
        "path": str(run.path),
        "status": run.status,
        "pid": run.pid,
        "host": run.host,
        "step": run.step,
        "total_steps": run.total_steps,
        "last_reward": find_last_reward(run),
        "latest_eval": None if latest is None else latest._asdict(),
        "seconds": run.seconds,
        "last_activity": None
        if moment is None
        else datetime.fromtimestamp(moment, UTC).isoformat(),
        "problems": run.problems,
    }
