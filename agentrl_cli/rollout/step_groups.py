"""The groups of one step as their trajectories end, and which of them others take the place of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import Task
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.scores import compute_group_statistics


class StepGroups:
    """The groups of one step.

    A group that has ended without signal is replaced by that of the next spare task, which may
    be replaced in its turn, until there are no more spares. Which groups a step comes to have
    depends on how they scored, and not on the order in which they ended: they are the batch
    and as many spares as there are groups without signal among them, as far as spares reach.

    Args:
        step: the step.
        tasks: its batch.
        spares: tasks for further groups, in order of use.
        n_samples: trajectories of a group.
    """

    def __init__(
        self, step: int, tasks: Sequence[Task], spares: Sequence[Task], n_samples: int
    ) -> None:
        self._step = step
        self._n_samples = n_samples
        self._spares = list(spares)
        self._groups: dict[str, dict[int, Trajectory]] = {task.group_id: {} for task in tasks}
        self._first_attempts = [a for task in tasks for a in self._list_attempts(task)]
        self._replacing: list[str] = []
        self._num_left = len(self._first_attempts)

    @property
    def first_attempts(self) -> list[Attempt]:
        """The attempts at the batch's tasks; samples of a group are neighbours: they share
        prefixes."""
        return self._first_attempts

    @property
    def is_complete(self) -> bool:
        """True when every group has ended, those that replace others included."""
        return self._num_left == 0

    def add(self, trajectory: Trajectory) -> list[Attempt]:
        """Takes a trajectory that has ended; the attempts that are to be made on account of it."""
        group = self._groups[trajectory.group_id]
        group[trajectory.sample_index] = trajectory
        self._num_left -= 1
        if len(group) < self._n_samples or not self._spares or _has_signal(group):
            return []
        task = self._spares.pop(0)
        self._replacing.append(task.group_id)
        self._groups[task.group_id] = {}
        self._num_left += self._n_samples
        return self._list_attempts(task)

    def list_trajectories(self) -> list[Trajectory]:
        """All trajectories, group by group and by sample index, marked where they are replaced.

        The batch's groups come first, then those that replaced others, in order of use. The
        first of them replaced the first group without signal, and so on.
        """
        without_signal = (key for key, group in self._groups.items() if not _has_signal(group))
        replaced_by = dict(zip(without_signal, self._replacing, strict=False))
        return [
            replace(group[index], replaced_by=replaced_by[group_id])
            if group_id in replaced_by
            else group[index]
            for group_id, group in self._groups.items()
            for index in sorted(group)
        ]

    def _list_attempts(self, task: Task) -> list[Attempt]:
        return [
            Attempt(task=task, sample_index=index, step=self._step)
            for index in range(self._n_samples)
        ]


def _has_signal(group: dict[int, Trajectory]) -> bool:
    (statistics,) = compute_group_statistics(group.values()).values()
    return statistics.has_signal
