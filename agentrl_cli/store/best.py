"""Which of a run's evaluations, and of its checkpoints, is the best by a number of the report."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from agentrl_cli.store.run_folder import RunFolder

_PASS_AT = "pass_at_"


class EvalScore(NamedTuple):
    """What an evaluation that training made found."""

    step: int
    value: float


def read_metric(report: Mapping[str, Any], metric: str) -> float | None:
    """``mean_reward`` or ``pass_at_<k>`` of a report; None: it has none, or NaN."""
    if metric.startswith(_PASS_AT):
        passed = report.get("pass_at_k")
        value = passed.get(metric.removeprefix(_PASS_AT)) if isinstance(passed, dict) else None
    else:
        value = report.get(metric)
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else None


def find_best_eval(
    folder: RunFolder, metric: str, steps: Collection[int] | range
) -> EvalScore | None:
    """The highest evaluation after one of ``steps``, of equal ones the earliest; None: there is
    none that says ``metric``.

    Raises:
        StoreError: a report is damaged.
    """
    best = None
    for step in folder.eval_steps():
        value = read_metric(folder.read_eval_report(step), metric) if step in steps else None
        if value is not None and (best is None or value > best.value):
            best = EvalScore(step, value)
    return best


def find_best_checkpoint(folder: RunFolder, metric: str) -> tuple[EvalScore, Path] | None:
    """The checkpoint with the highest evaluation; None: no checkpoint was evaluated.

    Raises:
        StoreError: a report is damaged.
    """
    saved = dict(folder.list_checkpoints())
    best = find_best_eval(folder, metric, saved.keys())
    return None if best is None else (best, saved[best.step])
