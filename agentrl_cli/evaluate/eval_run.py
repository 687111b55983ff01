"""An evaluation: every task is attempted, and a report is made of the trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.evaluate.eval_report import EvalReport, build_report
from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.scheduler import run_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.store.run_folder import RunFolder


async def evaluate(
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tasks: Sequence[Task],
    *,
    n_samples: int,
    max_concurrent: int,
    observer: Observer,
    step: int = 0,
    pass_threshold: float = 1.0,
) -> tuple[EvalReport, list[Trajectory]]:
    """The report and the trajectories of ``n_samples`` attempts at every task.

    ``step`` is the step after which the model is evaluated (0: before the first).

    Raises:
        UserInputError: a mistake that would repeat itself in every trajectory.
    """
    observer.on_stage("evaluation", len(tasks) * n_samples)
    progress = _Progress(observer)
    trajectories = await run_tasks(
        workflow,
        engine,
        tasks,
        n_samples=n_samples,
        max_concurrent=max_concurrent,
        step=step,
        on_finished=progress.on_finished,
    )
    k_values = choose_k_values(n_samples)
    report = build_report(trajectories, k_values=k_values, pass_threshold=pass_threshold)
    return report, trajectories


async def evaluate_and_store(
    folder: RunFolder,
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    tasks: Sequence[Task],
    *,
    n_samples: int,
    max_concurrent: int,
    observer: Observer,
    step: int = 0,
    label: str | None = None,
) -> EvalReport:
    """As :func:`evaluate`; the trajectories and the report are stored, even if all failed.

    Raises:
        RolloutFailedError: every trajectory failed in the same way; stored with the label
            ``failed``, so that the evaluation still counts as not done.
        UserInputError: a mistake that would repeat itself in every trajectory.
    """
    try:
        report, trajectories = await evaluate(
            workflow,
            engine,
            tasks,
            n_samples=n_samples,
            max_concurrent=max_concurrent,
            observer=observer,
            step=step,
        )
    except RolloutFailedError as error:
        failed = build_report(error.trajectories, k_values=choose_k_values(n_samples))
        folder.write_eval(step, error.trajectories, failed.to_dict(), label="failed")
        raise
    folder.write_eval(step, trajectories, report.to_dict(), label=label)
    return report


def choose_k_values(n_samples: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``n_samples``, itself included."""
    return (*(2**power for power in range((n_samples - 1).bit_length())), n_samples)


class _Progress:
    """Reports how many trajectories have finished, and their mean reward so far."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._num_done = 0
        self._rewards: list[float] = []

    def on_finished(self, trajectory: Trajectory) -> None:
        self._num_done += 1
        if trajectory.reward is not None and not math.isnan(trajectory.reward):
            self._rewards.append(trajectory.reward)
        mean = math.fsum(self._rewards) / len(self._rewards) if self._rewards else None
        note = f"mean reward {mean:.3f}" if mean is not None else ""
        self._observer.on_progress(self._num_done, note)
