"""What the page of a comparison shows at once: several models on the same tasks, and the curves of
several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.report.report_columns import ReportSource, RunColumns, read_source
from agentrl_cli.inspector.report.report_data import (
    describe_eval,
    describe_trajectories,
    read_curves,
)
from agentrl_cli.inspector.trajectory_query import Source
from agentrl_cli.log import format_count
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import read_metric


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedEvaluation:
    """An evaluation that is compared with others."""

    letter: str
    name: str
    folder: RunFolder
    step: int
    label: str | None
    report: Mapping[str, Any]
    task_names: Mapping[str, str]
    """By task id. Tasks have the same name in two evaluations if they are the same task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run that has curves."""

    letters: str
    """Of the models that come from it, as ``A, B``."""
    name: str
    folder: RunFolder


def read_comparison(
    evaluations: Sequence[ComparedEvaluation],
    runs: Sequence[ComparedRun],
    verdicts: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> tuple[RunColumns, dict[str, Any]]:
    """All trajectories in columns, and what the page shows before it has them.

    Args:
        evaluations: those that are compared; none for the curves alone.
        runs: those whose curves are drawn into one picture; of runs without a step there is none.
        verdicts: a sentence about each letter but the first.
        notes: what a reader must know to believe them.
    """
    run = RunColumns([_read_source(evaluation) for evaluation in evaluations])
    evals = [
        describe_eval(number, source, evaluation.report)
        | {"name": f"{evaluation.letter}  {evaluation.name}"}
        for number, (source, evaluation) in enumerate(zip(run.sources, evaluations, strict=True))
    ]
    curves = [_read_run(each) for each in runs]
    curves = [each for each in curves if each["metrics"]["step"] or each["evals"]["step"]]
    compared = (len(evaluations), "model") if evaluations else (len(runs), "run")
    head = {
        "name": f"Comparison of {format_count(*compared)}",
        "training": None,
        "hasTokenizer": False,
        "comparison": {
            "verdicts": [{"after": key, "text": text} for key, text in (verdicts or {}).items()],
            "notes": [*notes],
            "runs": curves,
        },
        **describe_trajectories(run, evals),
    }
    return run, head


def _read_source(evaluation: ComparedEvaluation) -> ReportSource:
    source = Source(evaluation.step, is_eval=True, label=evaluation.label)
    found = read_source(evaluation.folder, source, evaluation.letter)
    if found.columns is not None:
        texts = found.columns.texts
        texts["task_id"] = [evaluation.task_names.get(t or "", t) for t in texts["task_id"]]
    return found


def _read_run(run: ComparedRun) -> dict[str, Any]:
    means = {step: _read_mean(run.folder, step) for step in run.folder.eval_steps()}
    return {
        "letters": run.letters,
        "name": run.name,
        "metrics": read_curves(run.folder),
        "evals": {"step": [*means], "eval_mean": [*means.values()]},
    }


def _read_mean(folder: RunFolder, step: int) -> float | None:
    try:
        return read_metric(folder.read_eval_report(step), "mean_reward")
    except AgentrlError:
        return None
