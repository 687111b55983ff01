"""What a person sees while a command runs: a live display, or plain lines."""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from agentrl_cli.log import clean, format_count, format_failures
from agentrl_cli.sparkline import format_sparkline

#: Steps whose mean duration tells how long the rest will take.
_NUM_PACE_STEPS = 20
#: Seconds between two plain lines about the progress of one stage.
_PLAIN_INTERVAL = 10.0
#: Parts of every step: the step's own line says enough, unless one of them takes long.
_STEP_STAGES = frozenset({"rollout", "train", "publish", "save"})


def build_observer(total_steps: int | None = None) -> PlainObserver | RichObserver:
    """A live display on a terminal; plain lines for pipes, CI and dumb terminals."""
    if is_plain(os.environ, sys.stdout.isatty()):
        return PlainObserver(total_steps)
    return RichObserver(total_steps)


def is_plain(env: Mapping[str, str], is_terminal: bool) -> bool:
    """True where a display that moves the cursor would leave garbage."""
    # NO_COLOR asks for no colours, which the live display does without.
    return not is_terminal or bool(env.get("CI")) or env.get("TERM") == "dumb"


def format_step(metrics: Mapping[str, float], total_steps: int | None) -> str:
    """A step's metrics in one line: ``step 3/40  reward 0.412  812 tokens/s  ...``."""
    step = metrics.get("step", math.nan)
    name = f"{step:.0f}" if math.isfinite(step) else "?"
    parts = [f"step {name}" + (f"/{total_steps}" if total_steps else "")]
    for key, format_part in _STEP_PARTS.items():
        value = metrics.get(key, math.nan)
        if math.isfinite(value):
            parts.append(format_part(value))
    return "  ".join(p for p in parts if p)


class StepLines:
    """The line of every step, with the time that is left at the pace of the last ones."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._seconds: deque[float] = deque(maxlen=_NUM_PACE_STEPS)

    def format(self, metrics: Mapping[str, float], width: float = math.inf) -> str:
        """The line of the step that is over, with as many of its parts as fit into ``width``."""
        seconds, step = metrics.get("step_seconds", math.nan), metrics.get("step", math.nan)
        if math.isfinite(seconds):
            self._seconds.append(seconds)
        num_left, left = (self._total_steps or 0) - step, ""
        if self._seconds and num_left > 0:
            left = f"  {format_duration(num_left * statistics.fmean(self._seconds))} left"
        line, shown = "", dict(metrics)
        for name in (None, *_LEAST_PARTS):
            shown.pop(name or "", None)
            line = format_step(shown, self._total_steps) + left
            if len(line) <= width:
                break
        return line


def format_duration(seconds: float) -> str:
    """``40 s``, ``12 min`` or ``3 h 20 min``."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


_STEP_PARTS: dict[str, Callable[[float], str]] = {
    "reward_mean": lambda v: f"reward {v:.3f}",
    "policy_failures": lambda v: format_failures(v, 0),
    "surroundings_failures": lambda v: format_failures(0, v),
    "completion_tokens_mean": lambda v: f"{v:.0f} tokens/trajectory",
    "tool_calls_mean": lambda v: f"{v:.1f} tool calls",
    "tokens_per_second": lambda v: f"{v:,.0f} tokens/s",
    "step_seconds": lambda v: f"{v:.1f} s",
    "prefix_mismatch_fraction": lambda v: f"{v:.0%} prefix mismatches" if v else "",
    "server_failures": lambda v: format_count(v, "server failure") if v else "",
    "resampled_calls": lambda v: f"{format_count(v, 'call')} sampled again" if v else "",
}


#: What a narrow terminal does without, the first of them first.
_LEAST_PARTS = ("tokens_per_second", "tool_calls_mean", "completion_tokens_mean")


class PlainObserver:
    """One line an event on stdout; progress at most every ten seconds."""

    def __init__(
        self, total_steps: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lines = StepLines(total_steps)
        self._clock = clock
        self._lock = threading.Lock()
        self._stage = ""
        self._total: int | None = None
        self._next_line_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """There is nothing to release."""

    def on_stage(self, stage: str, total: int | None = None) -> None:
        """One line for a new stage, except for those inside a step."""
        with self._lock:
            is_new = (stage, total) != (self._stage, self._total)
            if is_new and stage not in _STEP_STAGES:
                self._print(f"{stage} ..." if total is None else f"{stage} (0/{total}) ...")
            self._stage, self._total = stage, total
            self._next_line_at = self._clock() + _PLAIN_INTERVAL

    def on_progress(self, num_done: int, note: str = "") -> None:
        with self._lock:
            if self._clock() < self._next_line_at:
                return
            self._next_line_at = self._clock() + _PLAIN_INTERVAL
            of = f"/{self._total}" if self._total is not None else ""
            self._print(f"{self._stage} ({num_done}{of}) {note}".rstrip())

    def on_step(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._print(self._lines.format(metrics))

    def on_message(self, text: str) -> None:
        with self._lock:
            self._print(text)

    def _print(self, text: str) -> None:
        print(clean(text), flush=True)


class RichObserver:
    """A line for every step, which stays, above a live display: the rewards so far and the stage in
    progress."""

    def __init__(self, total_steps: int | None = None, console: Console | None = None) -> None:
        self._console = console or Console()
        self._lines = StepLines(total_steps)
        # Reentrant: the display renders in a thread of its own, under its own lock.
        self._lock = threading.RLock()
        self._stage, self._num_done, self._note = "starting", 0, ""
        self._total: int | None = None
        self._stage_began = time.monotonic()
        self._rewards: list[float] = []
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            refresh_per_second=8,
            transient=True,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._live.stop()

    def on_stage(self, stage: str, total: int | None = None) -> None:
        with self._lock:
            self._stage, self._total, self._num_done, self._note = stage, total, 0, ""
            self._stage_began = time.monotonic()

    def on_progress(self, num_done: int, note: str = "") -> None:
        with self._lock:
            self._num_done, self._note = num_done, note

    def on_step(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            line = self._lines.format(metrics, self._console.width)
            self._rewards.append(metrics.get("reward_mean", math.nan))
        self._console.print(Text(line), soft_wrap=True)

    def on_message(self, text: str) -> None:
        """Prints the text above the display, where it stays."""
        self._console.print(Text(clean(text)))

    def _render(self) -> RenderableType:
        with self._lock:
            line = format_sparkline(self._rewards)
            rows = [Text("reward ").append(line, style="green")] if line else []
            return Group(*rows, self._render_stage())

    def _render_stage(self) -> RenderableType:
        row = Table.grid(padding=(0, 1))
        self._spinner.update(text=Text(self._stage))
        cells: list[RenderableType] = [self._spinner]
        if self._total:
            cells += [
                ProgressBar(total=self._total, completed=self._num_done, width=30),
                Text(f"{self._num_done}/{self._total}"),
            ]
        elapsed = time.monotonic() - self._stage_began
        cells += [Text(self._note, style="dim"), Text(f"{elapsed:.0f} s", style="dim")]
        row.add_row(*cells)
        return row
