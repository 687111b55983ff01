"""The trace of a run: what the trainer and every trajectory did when, for Perfetto.

The file is a JSON array of trace events ("Trace Event Format", the Chrome project). It is complete
after every step: a run that is killed leaves one that can be opened.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from agentrl_cli.log import clean, get_logger
from agentrl_cli.records import Interaction, Trajectory
from agentrl_cli.store import layout

_log = get_logger(__name__)

#: Where a trace ends, so that a long run does not fill the disk; Perfetto opens far more.
MAX_BYTES = 64_000_000
_BEGIN, _END = b"[\n", b"\n]\n"
_TRAINER, _TRAJECTORIES = 1, 2
#: Gaps that are shorter, in microseconds, are not worth an event.
_MIN_GAP = 100
#: Characters of a tool's name, which a model may have made up.
_MAX_NAME = 60


class RunTrace:
    """Writes the events of a run, from its start (or that of this process, if it was resumed);
    without a path, nothing.

    All methods are called from one thread. What the disk refuses ends the trace, not the run.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lanes: list[list[int]] = []
        """Of each lane, the ends and starts of what is in it, ascending."""
        self._events: list[dict[str, Any]] = []
        self._is_open = self._write(_BEGIN + _END, 0)
        self._size = len(_BEGIN) + len(_END)
        for process, name in ((_TRAINER, "trainer"), (_TRAJECTORIES, "trajectories")):
            self._describe("process_name", process, 0, name)
        self._describe("thread_name", _TRAINER, 1, "phases")
        self._describe("thread_name", _TRAINER, 2, "parts of them")

    def add_phase(self, name: str, started_at: float, seconds: float) -> None:
        """A phase of the trainer; ``started_at`` is a Unix time."""
        self._add(name, _TRAINER, 1, *_to_span(started_at, seconds))

    def add_update(self, started_at: float, metrics: Mapping[str, float]) -> None:
        """The parts of an update, from the metrics of its step."""
        num_seconds = metrics["logprob_seconds"]
        num_left = metrics["train_seconds"] - num_seconds
        self._add("logprobs", _TRAINER, 2, *_to_span(started_at, num_seconds))
        self._add("updates", _TRAINER, 2, *_to_span(started_at + num_seconds, num_left))

    def add_publication(
        self, version: int, started_at: float, metrics: Mapping[str, float]
    ) -> None:
        """A publication and its probes, and between them the moment from which the engine samples
        with the policy version."""
        served_at = started_at + metrics["publish_seconds"]
        self.add_phase("publish", started_at, metrics["publish_seconds"])
        event = {"name": f"policy version {version}", "ph": "i", "s": "g"}
        self._events.append(event | {"pid": _TRAINER, "tid": 1, "ts": round(served_at * 1e6)})
        self.add_phase("probe", served_at, metrics["probe_seconds"])

    def add_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Trajectories that a step is made of, with their model calls, tools and rewards."""
        for trajectory in trajectories if self._is_open else ():
            start = trajectory.started_at or min(
                (i.started_at for i in trajectory.interactions if i.started_at), default=0.0
            )
            if start:
                self._add_trajectory(step, trajectory, *_to_span(start, trajectory.seconds))

    def _add_trajectory(self, step: int, trajectory: Trajectory, start: int, end: int) -> None:
        lane = self._take_lane(start, end)
        failure, reward = trajectory.failure, trajectory.reward
        about = {
            "step": step,
            "task": trajectory.task_id,
            # JSON has no NaN.
            "reward": reward if reward is not None and math.isfinite(reward) else None,
            "turns": trajectory.num_turns,
            "completion tokens": trajectory.num_completion_tokens,
            "failure": None if failure is None else f"{failure.boundary}: {failure.kind}",
        }
        self._add(f"trajectory {trajectory.id}", _TRAJECTORIES, lane, start, end, about)
        judged_at = max(start, end - round(trajectory.reward_seconds * 1e6))
        cursor, doing = start, "agent"
        for call in sorted(trajectory.interactions, key=lambda i: i.started_at):
            begin, stop = _to_span(call.started_at, call.seconds)
            begin, stop = max(begin, start), min(stop, judged_at)
            if stop <= begin:
                continue
            is_beside = begin < cursor
            # Calls at the same time stand in lanes of their own: events of one lane cannot overlap.
            where = self._take_lane(begin, stop) if is_beside else lane
            if not is_beside and begin - cursor >= _MIN_GAP:
                self._add(doing, _TRAJECTORIES, lane, cursor, begin)
            name = f"model call, {trajectory.id}" if is_beside else "model call"
            self._add(name, _TRAJECTORIES, where, begin, stop, _describe_call(call))
            cursor, doing = max(cursor, stop), _name_work(call)
        if judged_at - cursor >= _MIN_GAP:
            self._add(doing, _TRAJECTORIES, lane, cursor, judged_at)
        if judged_at < end:
            self._add("reward", _TRAJECTORIES, lane, judged_at, end)

    def flush(self) -> None:
        """Writes what was added since the last time; after ``MAX_BYTES``, nothing more."""
        events, self._events = self._events, []
        if not self._is_open:
            return
        lines, size = [], self._size
        for event in events:
            lines.append(json.dumps(event, separators=(",", ":")).encode())
            size += len(lines[-1]) + 2
            if size > MAX_BYTES:
                lines.pop()
                break
        if not lines:
            return
        is_full = len(lines) < len(events)
        is_first = self._size == len(_BEGIN) + len(_END)
        added = (b"" if is_first else b",\n") + b",\n".join(lines) + _END
        place = self._size - len(_END)
        self._is_open = self._write(added, place) and not is_full
        self._size = place + len(added)
        if is_full and self._path is not None:
            _log.info("%s is full and ends here", layout.describe(self._path))

    def _write(self, content: bytes, place: int) -> bool:
        if self._path is None:
            return False
        try:
            if not place:
                self._path.unlink(missing_ok=True)
            # What tools are called with is for the user alone.
            self._path.touch(0o600)
            with self._path.open("r+b", buffering=0) as file:
                file.seek(place)
                file.write(content)
        except OSError as error:
            _log.warning("%s ends here: %s", layout.describe(self._path), error)
            return False
        return True

    def _add(
        self,
        name: str,
        process: int,
        lane: int,
        start: int,
        end: int,
        about: dict[str, Any] | None = None,
    ) -> None:
        event = {"name": name, "ph": "X", "pid": process, "tid": lane, "ts": start}
        event["dur"] = end - start
        self._events.append(event | ({"args": about} if about else {}))

    def _describe(self, kind: str, process: int, lane: int, name: str) -> None:
        event = {"name": kind, "ph": "M", "pid": process, "tid": lane, "ts": 0}
        self._events.append(event | {"args": {"name": name}})

    def _take_lane(self, start: int, end: int) -> int:
        """The number of the first lane that is free in this time, which is then taken."""
        for number in count(1):
            if number > len(self._lanes):
                self._lanes.append([])
                self._describe("thread_name", _TRAJECTORIES, number, f"lane {number}")
            taken = self._lanes[number - 1]
            place = bisect(taken, start)
            # Even: between two that are there; and the next one begins after this one ends.
            if place % 2 == 0 and (place == len(taken) or end <= taken[place]):
                taken[place:place] = [start, end]
                return number
        raise AssertionError


def _to_span(started_at: float, seconds: float) -> tuple[int, int]:
    """Start and end in microseconds."""
    return round(started_at * 1e6), round((started_at + seconds) * 1e6)


def _describe_call(call: Interaction) -> dict[str, Any]:
    versions = sorted(set(call.versions))
    return {
        "prompt tokens": len(call.prompt_ids),
        "completion tokens": call.num_completion_tokens,
        "policy versions": ", ".join(map(str, versions)),
        "status": call.status.value,
    }


def _name_work(call: Interaction) -> str:
    """What follows a model call: the tools that it asked for, or the agent's own code."""
    names = ", ".join(dict.fromkeys(_list_tools(call)))
    return f"tools: {clean(names)[:_MAX_NAME]}" if names else "agent"


def _list_tools(call: Interaction) -> Iterator[str]:
    for asked in (call.reply or {}).get("tool_calls") or ():
        function = asked.get("function") if isinstance(asked, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            yield function["name"]
