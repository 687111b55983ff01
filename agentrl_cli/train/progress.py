"""Tells an observer how far the batch in progress is."""

from __future__ import annotations

from collections import Counter

from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory


class BatchProgress:
    """Counts finished trajectories of the step that the trainer waits for.

    Trajectories of later steps finish meanwhile; they count when their step comes. Those of
    groups that are replaced count no more: as many are to be made once again.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._num_finished: Counter[int] = Counter()
        self._num_replaced_groups: Counter[int] = Counter()
        self._step: int | None = None

    def begin(self, step: int) -> None:
        """Now the trainer waits for ``step``."""
        self._step = step
        self._tell()

    def on_finished(self, trajectory: Trajectory) -> None:
        """Counts one trajectory."""
        self._num_finished[trajectory.step] += 1
        if trajectory.step == self._step:
            self._tell()

    def on_replaced(self, step: int, num_trajectories: int) -> None:
        """A group of ``step`` gave its place to another, of so many trajectories."""
        self._num_finished[step] -= num_trajectories
        self._num_replaced_groups[step] += 1
        if step == self._step:
            self._tell()

    def _tell(self) -> None:
        assert self._step is not None
        num_replaced = self._num_replaced_groups[self._step]
        note = f"{num_replaced} groups replaced" if num_replaced else ""
        self._observer.on_progress(self._num_finished[self._step], note)
