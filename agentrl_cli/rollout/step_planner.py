"""Which trajectory starts when, and which groups make a step: decided from what happened alone.

Nothing here waits or knows a clock. The scheduler tells what happens, and so can a simulation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl_cli.records import Failure, Trajectory
from agentrl_cli.rollout.dataset import Task, TaskStream, list_outcomes, parse_group_id
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.scores import compute_group_statistics, compute_score
from agentrl_cli.store.trajectory_summary import OpenRounds

_Group = dict[int, Trajectory]


@dataclass(slots=True, eq=False)
class _Place:
    """Room for one group in a step: a task's, or that of the backup task that replaces it."""

    round: int
    position: int
    groups: dict[str, _Group]
    """By id; the last one is the one that is made, those before it were without signal."""
    num_left: int
    first_version: int | None = None
    """The policy version under which its first trajectory began."""

    @property
    def age_order(self) -> tuple[int, int, int]:
        """Of groups that have ended, the oldest first."""
        assert self.first_version is not None
        return self.first_version, self.round, self.position

    def note_version(self, version: int) -> None:
        """A trajectory begins, or began, under ``version``."""
        known = self.first_version
        self.first_version = version if known is None else min(known, version)

    @property
    def is_scored(self) -> bool:
        """True where a trajectory of the group has a reward."""
        return any(t.reward is not None for t in [*self.groups.values()][-1].values())


class StepPlanner:
    """Admits tasks ahead of the trainer, and makes its steps of groups that have ended.

    Tasks come in rounds: round k is ``stream.batch(k)``, as many groups as a step has. Step k is
    made while the policy version is k - 1, and until then the rounds up to k + ``max_staleness``
    are admitted; so no more than ``max_staleness + 1`` steps' worth of groups are in progress or
    wait to be trained on. A step is made of the oldest groups that have ended: a slow one is passed
    over and goes into a later step. But a group whose first trajectory began under version v is in
    step v + 1 + ``max_trajectory_age`` at the latest: a step waits for groups where the steps that
    are left to them would not have room for all. With ``max_staleness`` 0, step k is round k.

    A group that has ended without signal is replaced by that of its round's next backup task, which
    may be replaced in turn, until no backup task is left. Both are given to the trainer with the
    same step, the first one marked.

    A task of which ``max_failed_groups`` groups in a row failed through their surroundings is set
    aside until the run is resumed: its place in a step stays empty. A step in which nothing worked
    does not count: that was no task's doing.

    Args:
        stream: the tasks.
        n_samples: trajectories of a group.
        max_staleness, max_trajectory_age: see above; the age is at least the staleness.
        first_step: the first that is to be made.
        last_step: of the run.
        already_finished: what an interrupted run has left; it is not made again.
        max_failed_groups: see above; None: no task is set aside.
        open_rounds: the :attr:`open_rounds` of the step before ``first_step``.
    """

    def __init__(
        self,
        stream: TaskStream,
        *,
        n_samples: int,
        max_staleness: int,
        max_trajectory_age: int,
        first_step: int,
        last_step: int,
        already_finished: Iterable[Trajectory] = (),
        max_failed_groups: int | None = None,
        open_rounds: OpenRounds | None = None,
    ) -> None:
        self.next_step = first_step
        """The step that is made now."""
        self.open_rounds: OpenRounds = open_rounds or {}
        """What a resumed run has to know besides the last step that was made.

        Of the rounds up to that step, those with groups that no step was made of yet, and of later
        rounds those of which a step has taken groups; with the groups that steps were made of.
        """
        self.set_aside: dict[str, Failure] = {}
        """Tasks that were set aside by the last step, by id, and the last failure of each."""
        self.num_replaced = 0
        """Groups of steps to come that backup tasks have replaced."""
        self._stream = stream
        self._n_samples = n_samples
        self._max_staleness = max_staleness
        self._max_age = max_trajectory_age
        self._last_step = last_step
        self._version = first_step - 1
        self._already_finished = {t.id: t for t in already_finished}
        self._taken = {number: {*names} for number, names in self.open_rounds.items()}
        self._failing: dict[str, int] = {}
        self._max_failed_groups = max_failed_groups
        self._next_round = first_step
        self._places: dict[str, _Place] = {}
        self._backup_tasks: dict[int, deque[Task]] = {}
        self._waiting: list[tuple[tuple[int, int, int], Attempt]] = []
        self._num_ended = self._num_complete = 0
        for number in sorted(n for n in self._taken if n < first_step):
            self._admit(number)

    def publish(self, version: int) -> None:
        """The engine samples with ``version`` from now on; first, that before ``first_step``."""
        self._version = version
        while self._next_round <= min(version + 1 + self._max_staleness, self._last_step):
            self._admit(self._next_round)
            self._next_round += 1

    def start(self) -> Attempt | None:
        """The trajectory that is to start next, once; None while there is none."""
        if not self._waiting:
            return None
        _, attempt = heapq.heappop(self._waiting)
        place = self._places[attempt.task.group_id]
        place.note_version(self._version)
        return attempt

    def finish(self, trajectory: Trajectory) -> None:
        """A trajectory has ended."""
        self._queue(self._count_in(trajectory))

    def take_step(self) -> list[Trajectory] | None:
        """The trajectories of the next step, group by group; None while it waits for some.

        The groups are in the order of their tasks, and after those the ones that replaced others,
        in order of use; the first of them is said to replace the first group without signal, and
        so on. So which groups are marked does not depend on the order in which they ended.
        """
        places = self._choose()
        if places is None:
            return None
        groups: dict[str, _Group] = {}
        for place in sorted(places, key=lambda place: (place.round, place.position)):
            groups |= place.groups
            self._taken.setdefault(place.round, set()).update(place.groups)
            self.num_replaced -= len(place.groups) - 1
        names = sorted(groups, key=lambda name: (self._is_backup(name), *parse_group_id(name)))
        for name in names:
            del self._places[name]
        trajectories = self._list_trajectories({name: groups[name] for name in names})
        self._count_failures(groups.values())
        scores = ((t.group_id, t.task_id, compute_score(t)) for t in trajectories)
        self._stream.observe(self.next_step, list_outcomes(scores))
        self._num_complete -= len(places)
        self._num_ended -= len(places) * self._n_samples
        self.next_step += 1
        self._close_rounds()
        return trajectories

    def count_cooling(self, step: int) -> int:
        """Tasks that the curriculum left out of the epoch in which the round of a step, whose
        trajectories were given, was chosen. May be called from any thread."""
        return self._stream.count_cooling(step)

    def count_finished(self) -> int:
        """Trajectories of the next step that have ended, as far as is known which they are."""
        batch_size = self._stream.batch_size
        # Each group that is still to end lacks at least one.
        limit = batch_size * self._n_samples - max(0, batch_size - self._num_complete)
        return min(self._num_ended, limit)

    def _admit(self, number: int) -> None:
        taken = self._taken.get(number, set())
        backup_tasks = self._stream.backup_tasks(number)
        self._backup_tasks[number] = deque(t for t in backup_tasks if t.group_id not in taken)
        for position, task in enumerate(self._stream.batch(number)):
            if task.group_id in taken:
                continue
            place = _Place(number, position, {}, 0)
            if self._is_set_aside(task):
                place.groups, place.first_version = {task.group_id: {}}, self._version
                self._places[task.group_id] = place
                self._num_complete += 1
                self._num_ended += self._n_samples
            else:
                self._queue(self._open_group(place, task))

    def _is_set_aside(self, task: Task) -> bool:
        limit = self._max_failed_groups
        return limit is not None and self._failing.get(task.task_id, 0) >= limit

    def _count_failures(self, groups: Iterable[_Group]) -> None:
        """Takes note of the tasks whose groups failed through their surroundings, all of them."""
        self.set_aside = {}
        made = [[*group.values()] for group in groups if group]
        failed = {
            group[-1].task_id: group[-1].failure
            for group in made
            if all(t.failure is not None and not t.is_policy_failure for t in group)
        }
        if len(failed) == len(made):
            return
        for task_id in {group[-1].task_id for group in made}:
            failure = failed.get(task_id)
            if failure is None:
                self._failing.pop(task_id, None)
                continue
            self._failing[task_id] = self._failing.get(task_id, 0) + 1
            if self._failing[task_id] == self._max_failed_groups:
                self.set_aside[task_id] = failure

    @property
    def num_set_aside(self) -> int:
        """Tasks that are set aside. May be read from any thread."""
        limit = self._max_failed_groups
        return 0 if limit is None else sum(n >= limit for n in [*self._failing.values()])

    def _open_group(self, place: _Place, task: Task) -> list[Attempt]:
        place.groups[task.group_id] = {}
        place.num_left = self._n_samples
        self._places[task.group_id] = place
        return [
            Attempt(task=task, sample_index=index, step=place.round)
            for index in range(self._n_samples)
        ]

    def _queue(self, attempts: Sequence[Attempt]) -> None:
        """Lets attempts wait for their start, those excepted that were made already."""
        pending = deque(attempts)
        while pending:
            attempt = pending.popleft()
            finished = self._already_finished.pop(attempt.id, None)
            # A program's own task is not known to the program that comes after an interruption.
            if finished is not None and finished.task_id == attempt.task.task_id:
                place = self._places[finished.group_id]
                versions = (v for i in finished.interactions for v in i.versions if v >= 0)
                place.note_version(min(versions, default=self._version))
                pending.extend(self._count_in(finished))
            else:
                order = (*parse_group_id(attempt.task.group_id), attempt.sample_index)
                heapq.heappush(self._waiting, (order, attempt))

    def _count_in(self, trajectory: Trajectory) -> list[Attempt]:
        """Takes a trajectory that has ended; the attempts that are to be made for it."""
        place = self._places[trajectory.group_id]
        group = place.groups[trajectory.group_id]
        group[trajectory.sample_index] = trajectory
        place.num_left -= 1
        self._num_ended += 1
        if place.num_left:
            return []
        backup_tasks = self._backup_tasks[place.round]
        if not backup_tasks or _has_signal(group):
            self._num_complete += 1
            return []
        self.num_replaced += 1
        self._num_ended -= self._n_samples
        return self._open_group(place, backup_tasks.popleft())

    def _choose(self) -> list[_Place] | None:
        """The places that the next step is made of; None while it waits."""
        batch_size = self._stream.batch_size
        if self._num_complete < batch_size:
            return None
        places = {*self._places.values()}
        complete = sorted((p for p in places if not p.num_left), key=lambda p: p.age_order)
        chosen = complete[:batch_size]
        is_awaiting = len(complete) < len(places)
        if not any(p.is_scored for p in chosen):
            # What fails ends early. A step of nothing else would teach nothing, and says nothing of
            # the agent while others are still at work.
            scored = next((p for p in complete if p.is_scored), None)
            if scored is None and is_awaiting:
                return None
            chosen[-1] = scored or chosen[-1]
        left = [p.first_version for p in places.difference(chosen) if p.first_version is not None]
        last_steps = sorted(version + 1 + self._max_age for version in left)
        is_late = any(
            number >= (last - self.next_step) * batch_size for number, last in enumerate(last_steps)
        )
        return None if is_late and is_awaiting else chosen

    def _close_rounds(self) -> None:
        """Forgets the rounds of which nothing is left; notes those that are open."""
        left = {place.round for place in self._places.values() if place.round < self.next_step}
        for number in [n for n in self._taken if n < self.next_step and n not in left]:
            del self._taken[number], self._backup_tasks[number]
        self.open_rounds = {n: sorted(self._taken.get(n, ())) for n in left | {*self._taken}}

    def _list_trajectories(self, groups: Mapping[str, _Group]) -> list[Trajectory]:
        without_signal = (n for n, group in groups.items() if group and not _has_signal(group))
        replacing = (name for name in groups if self._is_backup(name))
        replaced_by = dict(zip(without_signal, replacing, strict=False))
        return [
            replace(group[index], step=self.next_step, replaced_by=replaced_by.get(name))
            for name, group in groups.items()
            for index in sorted(group)
        ]

    def _is_backup(self, group_id: str) -> bool:
        return parse_group_id(group_id)[1] >= self._stream.batch_size


def _has_signal(group: _Group) -> bool:
    (statistics,) = compute_group_statistics(group.values()).values()
    return statistics.has_signal
