"""What the application reads of a run: in a thread of its own, one thing after the other."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.list_view import StepSummary
from agentrl_cli.inspector.trajectory_query import Found, Source, list_sources
from agentrl_cli.inspector.trajectory_view import Spell, find_untrained_reason, load_spell
from agentrl_cli.records import Trajectory
from agentrl_cli.scores import GroupStatistics, compute_statistics
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import read_metric
from agentrl_cli.store.trajectory_file import (
    ProximalLogprobs,
    read_summaries,
    read_totals,
    read_trajectory,
)
from agentrl_cli.store.trajectory_summary import TrajectorySummary, TrajectoryTotals

ResultT = TypeVar("ResultT")

#: Files whose totals are read before the screen shows them.
_FILES_AT_A_TIME = 25


@dataclass(frozen=True)
class GroupRow:
    """The trajectories of one task in a step, in numbers."""

    members: Sequence[Found]

    @property
    def first(self) -> TrajectorySummary:
        """The first of them: group, task and question are those of all."""
        return self.members[0].summary

    @property
    def mean(self) -> float | None:
        """The mean score; None: none is scored."""
        return self.statistics.mean if self.statistics.num_scored else None

    @cached_property
    def statistics(self) -> GroupStatistics:
        """Mean and deviation of the scores, as training compares them."""
        scores = (found.summary.score for found in self.members)
        return compute_statistics([score for score in scores if score is not None])


@dataclass(frozen=True, slots=True)
class OpenedTrajectory:
    """One trajectory, and what its tokens are shown with."""

    trajectory: Trajectory
    untrained_reason: str | None
    """Why none of its tokens is trained on; None: they are."""
    proximal: ProximalLogprobs


class RunReader:
    """Reads a run folder for the screens. Its coroutines do not block the loop that awaits them;
    one that is cancelled before its turn reads nothing.

    All of them raise AgentrlError for what is missing or damaged.
    """

    def __init__(self, folder: RunFolder, tokenizer_path: str | None) -> None:
        self.folder = folder
        self._tokenizer_path = tokenizer_path
        self._thread = ThreadPoolExecutor(1, "agentrl-inspector")
        self._totals: dict[Source, TrajectoryTotals | str] = {}
        self._states: dict[Source, tuple[int, int]] = {}
        self._alarms: dict[int, list[str]] = {}
        self._metrics: dict[int, dict[str, float]] = {}
        self._sources: list[Source] = []
        self._spell: Spell | None = None

    def close(self) -> None:
        """Ends the thread when it has read what it is reading."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def run(self, read: Callable[[], ResultT]) -> ResultT:
        """What ``read`` gives, which the thread calls."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def follow(self, show: Callable[[list[StepSummary]], None]) -> None:
        """Has all steps and evaluations shown, the latest first, if they are others than before: at
        once, and again as the totals of more of them are known."""
        has_news, unread = await self.run(self._look)
        if has_news:
            show(self._list_rows())
        for start in range(0, len(unread), _FILES_AT_A_TIME):
            await self.run(partial(self._read_totals, unread[start : start + _FILES_AT_A_TIME]))
            show(self._list_rows())

    def _look(self) -> tuple[bool, list[Source]]:
        """Whether there is anything new, and the files whose totals are to be read."""
        sources = list_sources(self.folder)
        # The latest first: it is they that somebody follows.
        sources.sort(key=lambda s: (s.step, s.is_eval, s.label or ""), reverse=True)
        unread = [s for s in sources if s not in self._states or self._is_written_anew(s)]
        lines = self.folder.read_metrics()
        metrics = {int(step): line for line in lines if (step := line.get("step", 0)) > 0}
        has_news = (
            bool(unread) or sources != self._sources or metrics.keys() != self._metrics.keys()
        )
        if has_news:
            self._alarms = self.folder.read_alarms()
        self._metrics, self._sources = metrics, sources
        return has_news, unread

    def _is_written_anew(self, source: Source) -> bool:
        try:
            return self._states[source] != _find_state(source.find_file(self.folder))
        except (AgentrlError, OSError):
            # It has just been deleted: the next look will not find it.
            return True

    def _read_totals(self, sources: Sequence[Source]) -> None:
        for source in sources:
            try:
                path = source.find_file(self.folder)
                self._states[source] = _find_state(path)
                self._totals[source] = read_totals(path)
            except (AgentrlError, OSError) as error:
                self._totals[source] = str(error)

    def _list_rows(self) -> list[StepSummary]:
        rows = []
        for source in self._sources:
            known = self._totals.get(source)
            metrics = {} if source.is_eval else self._metrics.get(source.step, {})
            rows.append(
                StepSummary(
                    source=source,
                    totals=None if isinstance(known, str) else known,
                    problem=known if isinstance(known, str) else None,
                    deviation=read_metric(metrics, "reward_std"),
                    alarms=() if source.is_eval else tuple(self._alarms.get(source.step, ())),
                )
            )
        return rows

    def list_rewards(self) -> list[float]:
        """The mean reward of every step so far, NaN where there is none."""
        return [line.get("reward_mean", math.nan) for _, line in sorted(self._metrics.items())]

    async def count_steps(self) -> int | None:
        """How many steps the run is to have; None: its configuration cannot be read."""
        try:
            return await self.run(lambda: self.folder.load_config().train.total_steps)
        except AgentrlError:
            return None

    async def read_source(self, source: Source) -> list[Found]:
        """All trajectories of a step or an evaluation, without tokens and messages."""
        summaries = await self.run(lambda: read_summaries(source.find_file(self.folder)))
        return [Found(source, number, summary) for number, summary in enumerate(summaries)]

    async def read_one(self, found: Found) -> OpenedTrajectory:
        """One trajectory."""
        return await self.run(lambda: self._read_one(found))

    def _read_one(self, found: Found) -> OpenedTrajectory:
        path = found.source.find_file(self.folder)
        trajectory = read_trajectory(path, found.number)
        try:
            reason = find_untrained_reason(self.folder, found.source, trajectory)
        except AgentrlError as error:
            reason = f"whether it is trained cannot be told: {error}"
        proximal = found.source.read_proximal_logprobs(self.folder, trajectory)
        return OpenedTrajectory(trajectory, reason, proximal)

    async def load_spell(self) -> Spell | None:
        """What spells token ids; None: there is no tokenizer (yet)."""
        if self._spell is None:
            self._spell = await self.run(partial(load_spell, self.folder, self._tokenizer_path))
        return self._spell


def group_trajectories(found: Sequence[Found]) -> list[GroupRow]:
    """The trajectories by group, in the order in which they are stored."""
    groups: defaultdict[str, list[Found]] = defaultdict(list)
    for one in found:
        groups[one.summary.group_id].append(one)
    return [GroupRow(members) for members in groups.values()]


def _find_state(path: Path) -> tuple[int, int]:
    """What differs when a file is written anew."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size
