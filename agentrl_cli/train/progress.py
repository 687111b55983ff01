"""Tells an observer how far the batch in progress is."""

from __future__ import annotations

from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory


class BatchProgress:
    """Counts finished trajectories of the step that the trainer waits for.

    Trajectories of later steps finish meanwhile; they count when their step comes.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._num_finished: dict[int, int] = {}
        self._step: int | None = None

    def begin(self, step: int) -> int:
        """Now the trainer waits for ``step``; how many of its trajectories are finished."""
        self._step = step
        return self._num_finished.get(step, 0)

    def on_finished(self, trajectory: Trajectory) -> None:
        """Counts one trajectory."""
        step = trajectory.step
        self._num_finished[step] = self._num_finished.get(step, 0) + 1
        if step == self._step:
            self._observer.on_progress(self._num_finished[step])
