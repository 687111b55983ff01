"""How often each task of an evaluation is solved, as a dataset to choose from."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from agentrl_cli.evaluate.eval_report import has_passed
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
    rows = {t.task_id: t.task for t in trajectories}
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.known_reward is not None:
            rewards.setdefault(trajectory.task_id, []).append(trajectory.known_reward)
    lines = []
    for task_id, scored in sorted(rewards.items(), key=lambda item: int(item[0])):
        measured = {
            "pass_rate": statistics.fmean(map(has_passed, scored)),
            "mean_reward": statistics.fmean(scored),
        }
        lines.append(json.dumps({**rows[task_id], **measured}, ensure_ascii=False))
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)
