"""What a run has come to, read without its trajectories: in a few numbers, for lists of many runs,
and which of its evaluations is the best."""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentrl_cli.errors import AgentrlError, StoreError
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import store_errors
from agentrl_cli.store.folder_lock import LockState, look_up_lock
from agentrl_cli.store.run_folder import RunFolder

RunStatus = Literal["running", "finished", "stopped", "unknown", "damaged", "evaluation"]

#: Both files hold far more than these, and are in the form in which agentrl wrote them: to parse a
#: thousand of them whole takes half a minute.
_TOTAL_STEPS = re.compile(rb"^train:\n(?: .*\n)*?  total_steps: (\d{1,15})$", re.MULTILINE)
_METRIC = re.compile(rb'"(step|reward_mean|step_seconds)": ([^,}\s]+)')
_PASS_AT = "pass_at_"


class LatestEval(NamedTuple):
    """The newest evaluation that training made; one made beside it where there is no other."""

    step: int
    label: str | None
    mean_reward: float | None


@dataclass(kw_only=True)
class RunOutline:
    """What a list shows of a run; None where it is not known."""

    path: Path
    status: RunStatus = "damaged"
    pid: int | None = None
    """Of the command that runs, if it is on this machine."""
    host: str | None = None
    """Where the run was started last, if it may still be running there."""
    step: int = 0
    """The last that is done."""
    total_steps: int | None = None
    rewards: tuple[float, ...] = ()
    """The mean reward of each step; NaN where it has none."""
    seconds: float = 0.0
    """Sum of the steps' own: without evaluations and breaks between starts."""
    latest_eval: LatestEval | None = None
    last_activity: float | None = None
    """Unix time of the last change of what the run writes."""
    problems: tuple[str, ...] = ()


def read_outline(path: Path) -> RunOutline:
    """The outline of the run in the folder ``path``; what cannot be read is in its problems."""
    outline = RunOutline(path=path)
    lock: LockState | None = None
    problems: list[str] = []
    try:
        lock = look_up_lock(path / layout.LOCK)
    except OSError as error:
        problems.append(f"{path / layout.LOCK}: whether it is running is unknown ({error})")
    for read in (_read_activity, _read_total_steps, _read_metrics, _read_latest_eval):
        try:
            read(outline)
        except AgentrlError as error:
            problems.append(str(error))
        except (OSError, ValueError, ArithmeticError, RecursionError) as error:
            problems.append(f"{path}: cannot be read ({error})")
    outline.problems = tuple(problems)
    _judge(outline, lock)
    return outline


def _judge(outline: RunOutline, lock: LockState | None) -> None:
    """Fills in the status, and where the run may be if it is not seen from here."""
    if lock is not None and lock.is_held:
        outline.status, outline.pid = "running", lock.pid
        if lock.pid is None:
            outline.host = _read_host(outline.path)
    elif outline.total_steps is not None and outline.step >= outline.total_steps:
        outline.status = "finished"
    elif lock is None:
        outline.status = "unknown"
    elif outline.total_steps is None:
        is_training = any((outline.path / n).exists() for n in (layout.CONFIG, layout.METRICS))
        outline.status = "damaged" if is_training or outline.problems else "evaluation"
    else:
        host = None if lock.was_freed else _read_host(outline.path)
        is_elsewhere = host is not None and host != platform.node()
        outline.status = "unknown" if is_elsewhere else "stopped"
        outline.host = host if is_elsewhere else None


def _read_activity(outline: RunOutline) -> None:
    outline.last_activity = max(_list_changes(outline.path), default=None)


def _list_changes(path: Path) -> Iterator[float]:
    # Not the folder's own time: it changes with pages and exports that are written there later.
    folders = (layout.TRAJECTORIES, layout.PENDING, layout.CHECKPOINTS)
    names = (*folders, layout.METRICS, layout.CONFIG, layout.LOCK)
    for file in (*(path / name for name in names), *(path / layout.LOGS).glob("*.log")):
        # A run that continues may delete it meanwhile.
        with suppress(FileNotFoundError):
            yield file.stat().st_mtime


def _read_total_steps(outline: RunOutline) -> None:
    path = outline.path / layout.CONFIG
    if not path.exists():
        if (outline.path / layout.METRICS).exists():
            raise StoreError(f"{path}: is missing")
        return
    with store_errors(path, "read"):
        found = _TOTAL_STEPS.search(path.read_bytes())
    if found is None:
        raise StoreError(f"{path}: is damaged: train.total_steps is not found in it")
    outline.total_steps = int(found[1])


def _read_metrics(outline: RunOutline) -> None:
    path = outline.path / layout.METRICS
    if not path.exists():
        return
    rewards, is_empty = [], True
    with store_errors(path, "read"), path.open("rb") as file:
        for line in file:
            is_empty = False
            # As in RunFolder.read_metrics: a line that is being written is left out.
            if not line.rstrip().endswith(b"}"):
                continue
            metrics = {name: _parse_number(value) for name, value in _METRIC.findall(line)}
            step = metrics.get(b"step", math.nan)
            if math.isfinite(step):
                outline.step = int(step)
                rewards.append(metrics.get(b"reward_mean", math.nan))
                seconds = metrics.get(b"step_seconds", 0.0)
                outline.seconds += seconds if math.isfinite(seconds) else 0.0
    outline.rewards = tuple(rewards)
    if not rewards and not is_empty:
        raise StoreError(f"{path}: is damaged: no line of it is a step's")


def _parse_number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _read_latest_eval(outline: RunOutline) -> None:
    folder = RunFolder.open(outline.path)
    found = folder.list_evals()
    if found:
        step, label = next((e for e in reversed(found) if e[1] is None), found[-1])
        report = folder.read_eval_report(step, label=label)
        outline.latest_eval = LatestEval(step, label, read_metric(report, "mean_reward"))


def _read_host(path: Path) -> str | None:
    """The machine of the last start; None where the manifest does not say."""
    try:
        manifest = json.loads((path / layout.MANIFEST).read_bytes())
        return str(manifest["starts"][-1]["host"]["name"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


class EvalScore(NamedTuple):
    """The result of an evaluation that training made."""

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
    """The highest evaluation after one of ``steps``, the earliest of equal ones; None: none has
    ``metric``.

    Unscored trajectories count as the lowest reward of all these evaluations (for ``pass_at_<k>``,
    as not passed), or a model would be best by which of its attempts have no reward.

    Raises:
        StoreError: a report is damaged.
    """
    reports = {step: folder.read_eval_report(step) for step in folder.eval_steps() if step in steps}
    lowest = 0.0
    if not metric.startswith(_PASS_AT):
        known = [read_metric(report, "lowest_reward") for report in reports.values()]
        lowest = min((value for value in known if value is not None), default=0.0)
    ranked: list[tuple[float, EvalScore]] = []
    for step, report in reports.items():
        value = read_metric(report, metric)
        if value is not None:
            share = report.get("num_unscored", 0) / max(report.get("num_trajectories", 0), 1)
            ranked.append((value + share * (lowest - value), EvalScore(step, value)))
    return max(ranked, key=lambda pair: pair[0], default=(0.0, None))[1]


def find_best_checkpoint(folder: RunFolder, metric: str) -> tuple[EvalScore, Path] | None:
    """The checkpoint with the highest evaluation; None: no checkpoint was evaluated.

    Raises:
        StoreError: a report is damaged.
    """
    saved = dict(folder.list_checkpoints())
    best = find_best_eval(folder, metric, saved.keys())
    return None if best is None else (best, saved[best.step])
