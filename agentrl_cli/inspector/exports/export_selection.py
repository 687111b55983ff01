"""Which trajectories of a run are exported, read a few at a time."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from agentrl_cli.errors import UserInputError
from agentrl_cli.inspector.trajectory_query import Source, TrajectoryQuery, choose_sources
from agentrl_cli.records import Trajectory
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import iterate_trajectory_file, read_summaries

#: What goes into a run's exports where nothing says which model it trains.
_UNKNOWN_MODEL = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSelection:
    """Which trajectories are exported; None: all of them."""

    steps: str | None = None
    """``12``, ``3-7``, ``1,4,9``, ``last`` or ``all``."""
    evals: str | None = None
    """Evaluations instead of training steps: all of them, or those with this name."""
    min_reward: float | None = None
    max_per_task: int | None = None
    """The best of a task; of equal ones those that were sampled first."""

    @property
    def query(self) -> TrajectoryQuery:
        """The part that says in which files to look."""
        return TrajectoryQuery(steps=self.steps, evals=self.evals)


@dataclass(frozen=True, slots=True)
class ExportedSource:
    """A step or an evaluation, and the positions in its file of what is exported of it."""

    source: Source
    numbers: frozenset[int]
    folder: RunFolder

    def read(self) -> Iterator[tuple[int, Trajectory]]:
        """Position and trajectory of each, in the order of the file; few are in memory at once.

        Raises:
            StoreError: the file is missing or damaged.
        """
        for number, trajectory in enumerate(
            iterate_trajectory_file(self.source.find_file(self.folder))
        ):
            if number in self.numbers:
                yield number, trajectory


def select_for_export(folder: RunFolder, selection: ExportSelection) -> list[ExportedSource]:
    """The steps or evaluations of which something is exported.

    Raises:
        UserInputError: no such step or evaluation, or no trajectory with such a reward.
        StoreError: a file is missing or damaged.
    """
    numbers: dict[Source, set[int]] = {}
    best: defaultdict[str, list[tuple[float, int, int, Source]]] = defaultdict(list)
    num_seen = 0
    for place, source in enumerate(choose_sources(folder, selection.query)):
        numbers[source] = set()
        for number, summary in enumerate(read_summaries(source.find_file(folder))):
            num_seen += 1
            reward = -math.inf if summary.reward is None else summary.reward
            reward = -math.inf if math.isnan(reward) else reward
            if selection.min_reward is not None and reward < selection.min_reward:
                continue
            if selection.max_per_task is None:
                numbers[source].add(number)
                continue
            rivals = best[summary.task_id]
            # The places make all entries differ: sources are never compared.
            heapq.heappush(rivals, (reward, -place, -number, source))
            if len(rivals) > selection.max_per_task:
                heapq.heappop(rivals)
    for _, _, number, source in (entry for rivals in best.values() for entry in rivals):
        numbers[source].add(-number)
    if not any(numbers.values()):
        reason = f"has a reward of {selection.min_reward:g} or more" if num_seen else "is stored"
        raise UserInputError(
            f"{folder.location}: none of {num_seen} trajectories {reason}. Type a lower "
            "--min-reward, or --step all"
        )
    return [ExportedSource(s, frozenset(n), folder) for s, n in numbers.items() if n]


def read_model_name(folder: RunFolder) -> str:
    """The model that the run trains; of a folder that only evaluations were written to, a word."""
    path = folder.fetch(folder.config_path)
    return folder.load_config().model.path if path.is_file() else _UNKNOWN_MODEL
