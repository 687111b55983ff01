"""What the page shows at once: the run's curves, evaluations, alarms and what to look at first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from agentrl_cli.config.algorithm_config import ReinforcePlusPlusAdvantageConfig
from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.report.report_columns import ReportSource, RunColumns, SourceCache
from agentrl_cli.inspector.report.report_highlights import find_highlights
from agentrl_cli.log import sanitize
from agentrl_cli.prefix_mismatches import REMEDIES
from agentrl_cli.store.run_folder import RunFolder

#: Of the metrics of a step, those that have a curve.
_CURVES = (
    "reward_mean", "reward_std", "reward_min", "reward_max", "policy_failures",
    "surroundings_failures", "num_unscored", "truncated_fraction", "entropy", "logprob_gap_mean",
    "logprob_gap_max", "token_age_mean", "token_age_max", "rollout_seconds", "train_seconds",
    "publish_seconds", "probe_seconds", "step_seconds", "turns_mean", "completion_tokens_mean",
    "num_trajectories",
)  # fmt: skip


class ReportData:
    """A run as the page shows it; :meth:`read` it again when the run has gone on."""

    def __init__(self, folder: RunFolder, *, has_tokenizer: bool) -> None:
        self._folder = folder
        self._sources = SourceCache(folder)
        self._has_tokenizer = has_tokenizer

    def read(self) -> tuple[RunColumns, dict[str, Any]]:
        """All trajectories in columns, and what the page shows before it has them."""
        run = RunColumns([*self._sources.read()])
        evals = read_evals(run)
        alarms = self._folder.read_alarms()
        location = sanitize(self._folder.location)
        head = {
            "run": location,
            "name": "/".join(location.rstrip("/").split("/")[-2:]),
            "metrics": read_curves(self._folder),
            "highlights": find_highlights(run, alarms, evals),
            "training": self._describe_training(),
            "hasTokenizer": self._has_tokenizer,
            **describe_trajectories(run, evals),
            "hasGaps": bool(np.isfinite(run.columns["logprob_gap_max"]).any()),
        }
        return run, head

    def _describe_training(self) -> dict[str, Any] | None:
        """How advantages follow from returns; None: the run's configuration cannot be read."""
        try:
            algorithm = self._folder.load_config().train.algorithm
        except AgentrlError:
            return None
        advantage = algorithm.advantage
        is_batch = isinstance(advantage, ReinforcePlusPlusAdvantageConfig) and (
            advantage.baseline == "batch"
        )
        return {
            "advantage": advantage.kind,
            "baseline": "batch" if is_batch else "group",
            "isPenalized": algorithm.has_kl_reward or algorithm.overlong is not None,
            "needsSignal": algorithm.compares_within_groups
            and not algorithm.trains_without_advantage,
        }


def describe_trajectories(run: RunColumns, evals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What every page shows of its trajectories before it has them."""
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "numRows": run.num_rows,
        "sources": run.describe_sources(),
        # The page has the rewards of tasks from its columns.
        "evals": [{k: v for k, v in e.items() if k != "taskRewards"} for e in evals],
        "remedies": {cause.value: text for cause, text in REMEDIES.items()},
    }


def read_curves(folder: RunFolder) -> dict[str, list[float | None]]:
    """The metrics that have a curve, by step; None where a step has no finite number."""
    lines = {line["step"]: line for line in folder.read_metrics() if "step" in line}
    steps = sorted(step for step in lines if math.isfinite(step))
    curves: dict[str, list[float | None]] = {"step": [float(step) for step in steps]}
    for name in _CURVES:
        values = [_round(lines[step].get(name)) for step in steps]
        if any(value is not None for value in values):
            curves[name] = values
    return curves


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def read_evals(run: RunColumns) -> list[dict[str, Any]]:
    """The reports of the evaluations; one that another version wrote lacks what it did not say."""
    evals = []
    for number, known in enumerate(run.sources):
        source = known.source
        if not source.is_eval:
            continue
        try:
            report = known.folder.read_eval_report(source.step, label=source.label)
        except AgentrlError:
            # Its trajectories are there all the same.
            report = {}
        evals.append(describe_eval(number, known, report))
    return evals


def describe_eval(number: int, known: ReportSource, report: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation for the page; ``number``: the position of its source."""
    interval = report.get("interval") or []
    has_interval = [type(end) for end in interval] in ([float, float], [int, int])
    return {
        "source": number,
        "key": known.key,
        "name": known.name,
        "step": known.source.step,
        "label": known.source.label,
        "mean": _read_number(report, "mean_reward"),
        "interval": interval if has_interval else None,
        "threshold": _read_number(report, "pass_threshold") or 1.0,
        "numTasks": _read_number(report, "num_tasks"),
        "passAt": _read_numbers(report, "pass_at_k"),
        "turns": _read_numbers(report, "turns").get("mean"),
        "tokens": _read_numbers(report, "completion_tokens").get("mean"),
        "seconds": _read_numbers(report, "seconds").get("mean"),
        "policyFailures": _read_number(report, "num_policy_failures"),
        "surroundingsFailures": _read_number(report, "num_surroundings_failures"),
        "unscored": _read_number(report, "num_unscored"),
        "taskRewards": _read_numbers(report, "task_rewards"),
    }


def _read_numbers(report: Mapping[str, Any], name: str) -> dict[str, float]:
    values = report.get(name)
    known = values.items() if isinstance(values, dict) else ()
    return {str(k): float(v) for k, v in known if isinstance(v, int | float)}


def _read_number(report: Mapping[str, Any], name: str) -> float | None:
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
