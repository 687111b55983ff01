"""Where the time of a run goes: the phases of its steps, as metrics and in sentences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

#: Metrics that add up to ``step_seconds``, but for a small rest, and what they stand for.
STEP_PARTS = {
    "rollout_seconds": "waiting for trajectories",
    "store_seconds": "store",
    "train_seconds": "update",
    "engine_memory_seconds": "engine's memory",
    "publish_seconds": "publication",
    "probe_seconds": "probes",
}
#: Those that come between two steps.
BETWEEN_PARTS = {"evaluation_seconds": "evaluations", "save_seconds": "checkpoints"}
#: Metrics that add up to the seconds of the trajectories.
TRAJECTORY_PARTS = {
    "model_seconds": "model calls",
    "agent_seconds": "tools and agent code",
    "reward_seconds": "rewards",
}
#: Phases that the clock itself measures; updates and publications report their own time.
_MEASURED = ("rollout", "store", "engine_memory", "evaluation", "save")
_PAUSES = ("evaluation", "save")


class StepClock:
    """Measures the phases of steps. All times are of one thread, the trainer's.

    Args:
        on_phase: called after each phase with its name, the Unix time of its start, and its
            seconds.
    """

    def __init__(self, on_phase: Callable[[str, float, float], None] | None = None) -> None:
        self._on_phase = on_phase
        self._seconds = dict.fromkeys(_MEASURED, 0.0)
        self._step_started: float | None = None

    def begin_step(self) -> None:
        """Starts the time of the first step; that of a later one began when the one before ended:
        what comes between them is a part of it."""
        if self._step_started is None:
            self._step_started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A block whose time counts as ``name``; that of a pause is not the step's."""
        started_at, started = time.time(), time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            if name in self._seconds:
                self._seconds[name] += seconds
            if name in _PAUSES and self._step_started is not None:
                self._step_started += seconds
            if self._on_phase is not None:
                self._on_phase(name, started_at, seconds)

    def end_step(self) -> dict[str, float]:
        """The metrics of the step, which ends now: ``step_seconds``, and for each phase the time
        since the last call."""
        now = time.perf_counter()
        seconds = now - (now if self._step_started is None else self._step_started)
        measured = {f"{name}_seconds": value for name, value in self._seconds.items()}
        self._seconds = dict.fromkeys(_MEASURED, 0.0)
        self._step_started = now
        return {**measured, "step_seconds": seconds}


def describe_time(lines: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences on where the time of a run went, from the metrics of its steps."""
    totals = {
        name: math.fsum(line.get(name, 0.0) for line in lines)
        for name in ("step_seconds", *STEP_PARTS, *BETWEEN_PARTS, *TRAJECTORY_PARTS)
    }
    steps = totals["step_seconds"]
    whole = steps + sum(totals[name] for name in BETWEEN_PARTS)
    of_agents = sum(totals[name] for name in TRAJECTORY_PARTS)
    if not whole > 0:
        return []
    parts = {text: totals[name] for name, text in (STEP_PARTS | BETWEEN_PARTS).items()}
    parts["other"] = max(0.0, steps - sum(totals[name] for name in STEP_PARTS))
    described = [
        f"time to the end of the last step, {whole:,.0f} s:  {_format_shares(parts, whole)}"
    ]
    if of_agents > 0:
        parts = {text: totals[name] for name, text in TRAJECTORY_PARTS.items()}
        described.append(
            f"time of its trajectories, {of_agents:,.0f} s:  {_format_shares(parts, of_agents)}"
        )
    return described


def _format_shares(parts: Mapping[str, float], whole: float) -> str:
    """``update 61 %, store 3 %``, the largest first; what rounds to nothing is left out."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    shares = [(text, seconds / whole) for text, seconds in ordered]
    return ", ".join(f"{text} {100 * share:.0f} %" for text, share in shares if share >= 0.005)
