"""An evaluation: every task is attempted, a report is made of the trajectories, both are stored."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.evaluate.eval_report import EvalReport, build_report, has_passed
from agentrl_cli.log import Observer, format_failures
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.store.atomic_files import write_text
from agentrl_cli.store.run_folder import RunFolder


async def evaluate(
    folder: RunFolder,
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tasks: Sequence[Task],
    *,
    n_samples: int,
    rollout: RolloutConfig,
    observer: Observer,
    step: int = 0,
    label: str | None = None,
) -> EvalReport:
    """The report of ``n_samples`` attempts at every task after ``step`` (0: before the first),
    stored with their trajectories.

    Raises:
        RolloutFailedError: every trajectory failed in the same way; stored with a label that
            ends in ``failed``, so that the evaluation still counts as not done.
        UserInputError: a mistake that would repeat itself in every trajectory.
    """
    observer.on_stage("evaluation", len(tasks) * n_samples)
    num_done, rewards, causes = 0, [], Counter[str]()

    def show(trajectory: Trajectory) -> None:
        nonlocal num_done
        num_done += 1
        if trajectory.known_reward is not None:
            rewards.append(trajectory.known_reward)
        if trajectory.failure is not None:
            causes[trajectory.failure.cause] += 1
        mean = f"mean reward {math.fsum(rewards) / len(rewards):.3f}" if rewards else ""
        failed = format_failures(causes["policy"], causes["surroundings"])
        observer.on_progress(num_done, f"{mean}  {failed}".strip())

    k_values = choose_k_values(n_samples)
    try:
        trajectories = await run_tasks(
            workflow,
            engine,
            tasks,
            n_samples=n_samples,
            max_concurrent=rollout.max_concurrent,
            min_concurrent=rollout.min_concurrent,
            max_retries=rollout.count_retries(),
            step=step,
            on_finished=show,
        )
    except RolloutFailedError as error:
        failed = build_report(error.trajectories, k_values=k_values)
        label = folder.claim_eval(step, f"{label}-failed" if label else "failed")
        # The evaluation that is made again has the same tasks, and every id is there once.
        renamed = [
            replace(t, id=f"{label}:{t.id}", group_id=f"{label}:{t.group_id}")
            for t in error.trajectories
        ]
        folder.write_eval(step, renamed, failed.to_dict(), label=label)
        raise
    report = build_report(trajectories, k_values=k_values)
    folder.write_eval(step, trajectories, report.to_dict(), label=label)
    return report


def choose_k_values(n_samples: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``n_samples``, itself included."""
    return (*(2**power for power in range((n_samples - 1).bit_length())), n_samples)


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
