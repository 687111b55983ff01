"""Which tasks a step comes to have besides its batch, and which are left out of it.

Dynamic sampling: backup tasks replace groups without signal. Cooldown: a task whose group had no
signal is left out of some epochs. Both are functions of what is stored of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.dataset import GroupOutcome, Row, Task, TaskStream, list_outcomes
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.scores import compute_group_statistics
from agentrl_cli.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class _Cooldown:
    """How often in a row a task had no signal, and until when it is left out for that."""

    num_in_a_row: int
    """Groups without signal since the last one with it."""
    last_epoch: int
    """The last epoch in which it is left out."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was chosen for one step."""

    batch: list[int]
    backup_tasks: list[int]
    epochs: list[int]
    """That of every row of the batch."""

    def find(self, outcome: GroupOutcome) -> tuple[int, int] | None:
        """Row and epoch of a group; None: a program put a task of its own in its place."""
        position = int(outcome.group_id.rpartition(".")[2])
        row = [*self.batch, *self.backup_tasks][position]
        if outcome.task_id != str(row):
            return None
        return row, self.epochs[min(position, len(self.epochs) - 1)]


class CooldownTaskStream(TaskStream):
    """A task stream in which a task has a cooldown after a group without signal.

    It is left out of the next epoch; of two, four, ... and at most ``max_cooldown_epochs`` epochs
    when the group after that has none either; and comes every epoch again once a group of it
    has signal.

    The batch of step k is a function of the seed and of the outcomes of the steps up to
    k - 1 - ``max_staleness``: those that are certain to be known when its first trajectory may
    begin. Every step's outcomes must be given to :meth:`observe` once, those from before an
    interruption too.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        max_staleness: int,
        max_cooldown_epochs: int,
        num_backup_tasks: int = 0,
    ) -> None:
        super().__init__(
            rows,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            num_backup_tasks=num_backup_tasks,
        )
        self._num_rows = len(rows)
        self._lag = max_staleness + 1
        self._max_cooldown_epochs = max_cooldown_epochs
        self._outcomes: dict[int, Sequence[GroupOutcome]] = {}
        self._plans: dict[int, _Plan] = {}
        self._next_step = 1
        self._epoch = self._offset = 0
        self._cooldowns: dict[int, _Cooldown] = {}
        self._num_cooling: dict[int, int] = {}

    def batch(self, step: int) -> list[Task]:
        """The tasks of ``step``, until the step is done."""
        return self._build_tasks(step, self._plan(step).batch, first_position=0)

    def backup_tasks(self, step: int) -> list[Task]:
        """As :meth:`TaskStream.backup_tasks`, without tasks in cooldown while there are others."""
        return self._build_tasks(
            step, self._plan(step).backup_tasks, first_position=self.batch_size
        )

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Takes note of how the groups of ``step`` scored."""
        self._outcomes[step] = outcomes

    def count_cooling(self, step: int) -> int:
        """Tasks in cooldown in the epoch in which the batch of ``step``, already chosen, ends."""
        return self._num_cooling[step]

    def _plan(self, step: int) -> _Plan:
        while self._next_step <= step:
            planned, known = self._next_step, self._next_step - self._lag
            if known >= 1:
                if known not in self._outcomes:
                    raise RuntimeError(f"observe step {known} before step {planned} is chosen")
                self._take_in(self._plans.pop(known), self._outcomes.pop(known))
            self._plans[planned] = self._choose(planned)
            self._num_cooling[planned] = len(self._list_cooling())
            self._next_step += 1
        return self._plans[step]

    def _take_in(self, plan: _Plan, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            found = plan.find(outcome)
            if found is None or outcome.has_signal is None:
                continue
            row, epoch = found
            if outcome.has_signal:
                self._cooldowns.pop(row, None)
                continue
            before = self._cooldowns.get(row)
            num_in_a_row = before.num_in_a_row + 1 if before is not None else 1
            # 2 ** n grows without end, and no cooldown is longer than the limit.
            length = min(2 ** min(num_in_a_row - 1, 30), self._max_cooldown_epochs)
            self._cooldowns[row] = _Cooldown(num_in_a_row, epoch + length)

    def _choose(self, step: int) -> _Plan:
        batch: list[int] = []
        epochs: list[int] = []
        while len(batch) < self.batch_size:
            if self._offset == self._num_rows:
                self._epoch, self._offset = self._find_next_epoch(), 0
            row = self._order(self._epoch)[self._offset]
            self._offset += 1
            if not self._is_cooling(row):
                batch.append(row)
                epochs.append(self._epoch)
        return _Plan(batch, self._choose_backup_rows(step, batch, self._list_cooling()), epochs)

    def _find_next_epoch(self) -> int:
        """The first after this one in which any task takes part."""
        following = self._epoch + 1
        if len(self._cooldowns) < self._num_rows:
            return following
        return max(following, 1 + min(c.last_epoch for c in self._cooldowns.values()))

    def _is_cooling(self, row: int) -> bool:
        cooldown = self._cooldowns.get(row)
        return cooldown is not None and cooldown.last_epoch >= self._epoch

    def _list_cooling(self) -> list[int]:
        return [row for row in self._cooldowns if self._is_cooling(row)]


def build_task_stream(config: ExperimentConfig, rows: Sequence[Row]) -> TaskStream:
    """The training tasks of a run, with the curriculum that ``rollout.curriculum`` names."""
    dataset, curriculum = config.train_dataset, config.rollout.curriculum
    num_backup_tasks = config.resolve_max_backup_tasks()
    if curriculum is None:
        return TaskStream(
            rows,
            batch_size=dataset.batch_size,
            shuffle=dataset.shuffle,
            seed=config.seed,
            num_backup_tasks=num_backup_tasks,
        )
    return CooldownTaskStream(
        rows,
        batch_size=dataset.batch_size,
        shuffle=dataset.shuffle,
        seed=config.seed,
        max_staleness=config.rollout.max_staleness,
        max_cooldown_epochs=curriculum.max_cooldown_epochs,
        num_backup_tasks=num_backup_tasks,
    )


def recall_outcomes(stream: TaskStream, folder: RunFolder, first_step: int) -> None:
    """Tells a stream with cooldowns what is stored of the steps before ``first_step``.

    Raises:
        RunFolderError: a step's trajectories are gone.
    """
    if not isinstance(stream, CooldownTaskStream):
        return
    steps = range(1, first_step)
    missing = sorted(set(steps) - set(folder.trajectory_steps()))
    if missing:
        raise RunFolderError(
            f"{folder.path}: rollout.curriculum chooses tasks by what earlier steps showed of "
            f"them, and the trajectories of step {missing[0]} are gone ({len(missing)} of "
            f"{len(steps)} steps). Put the files back, or start a new run: trial_name=NAME "
            "model.path=CHECKPOINT"
        )
    for step in steps:
        summaries = folder.list_trajectories(step)
        stream.batch(step)
        stream.observe(step, list_outcomes((t.group_id, t.task_id, t.score) for t in summaries))


class StepGroups:
    """The groups of one step, and the backup tasks that replace those without signal.

    A group that has ended without signal is replaced by that of the next backup task, which may
    be replaced in turn, until no backup task is left. Which groups a step comes to have depends
    on how they scored, and not on the order in which they ended: they are the batch, and as many
    backup tasks as there are groups without signal among them, as far as backup tasks reach.

    Args:
        step: the step.
        tasks: its batch.
        backup_tasks: tasks for further groups, in order of use.
        n_samples: trajectories of a group.
    """

    def __init__(
        self, step: int, tasks: Sequence[Task], backup_tasks: Sequence[Task], n_samples: int
    ) -> None:
        self._step = step
        self._n_samples = n_samples
        self._backup_tasks = list(backup_tasks)
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
        """Takes a trajectory that has ended; returns attempts at a backup task."""
        group = self._groups[trajectory.group_id]
        group[trajectory.sample_index] = trajectory
        self._num_left -= 1
        if len(group) < self._n_samples or not self._backup_tasks or _has_signal(group):
            return []
        task = self._backup_tasks.pop(0)
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
