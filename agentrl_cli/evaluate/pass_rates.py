"""How often each task of an evaluation is solved, as a dataset to choose from."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

from agentrl_cli.evaluate.eval_report import has_passed
from agentrl_cli.records import Trajectory
from agentrl_cli.store.atomic_files import write_text
from agentrl_cli.store.run_folder import RunFolder


def save_pass_rates(folder: RunFolder, label: str, path: Path) -> int:
    """Writes the rows of an evaluation as JSON lines, in their order, each with two more fields:
    ``pass_rate``, the share of its scored trajectories that passed, and ``mean_reward``.

    Returns:
        The number of rows: tasks of which nothing was scored are left out.

    Raises:
        StoreError: the file cannot be written.
    """
    trajectories, _ = folder.read_eval(0, label=label)
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None and not math.isnan(trajectory.reward):
            by_task.setdefault(trajectory.task_id, []).append(trajectory)
    lines = []
    for _, scored in sorted(by_task.items(), key=lambda item: int(item[0])):
        rewards = [t.reward for t in scored if t.reward is not None]
        measured = {
            "pass_rate": statistics.fmean(map(has_passed, rewards)),
            "mean_reward": statistics.fmean(rewards),
        }
        lines.append(json.dumps({**scored[0].task, **measured}, ensure_ascii=False))
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)
