"""Tasks that taught nothing rest for some epochs: a function of what is stored of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunFolderError
from agentrl_cli.rollout.dataset import Row, Task, TaskStream
from agentrl_cli.rollout.outcomes import GroupOutcome, list_outcomes
from agentrl_cli.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class _Rest:
    """Since when a task has taught nothing, and how long it is left alone for it."""

    num_in_a_row: int
    """Groups without signal since the last one with it."""
    last_epoch: int
    """The last epoch in which it is left out."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What was chosen for one step."""

    batch: list[int]
    spares: list[int]
    epochs: list[int]
    """That of every row of the batch."""

    def find(self, outcome: GroupOutcome) -> tuple[int, int] | None:
        """Row and epoch of a group; None: a program put a task of its own in its place."""
        position = int(outcome.group_id.rpartition(".")[2])
        row = [*self.batch, *self.spares][position]
        if outcome.task_id != str(row):
            return None
        return row, self.epochs[min(position, len(self.epochs) - 1)]


class RestingTaskStream(TaskStream):
    """A task stream in which a task rests after a group without signal.

    It is left out of the next epoch; of two, four, ... and at most ``max_rest_epochs`` epochs
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
        max_rest_epochs: int,
        num_spares: int = 0,
    ) -> None:
        super().__init__(
            rows, batch_size=batch_size, shuffle=shuffle, seed=seed, num_spares=num_spares
        )
        self._num_rows = len(rows)
        self._lag = max_staleness + 1
        self._max_rest_epochs = max_rest_epochs
        self._outcomes: dict[int, Sequence[GroupOutcome]] = {}
        self._plans: dict[int, _Plan] = {}
        self._next_step = 1
        self._epoch = self._offset = 0
        self._rests: dict[int, _Rest] = {}
        self._num_resting: dict[int, int] = {}

    def batch(self, step: int) -> list[Task]:
        """The tasks of ``step``; of a step that is done no more."""
        return self._build_tasks(step, self._plan(step).batch, first_position=0)

    def spares(self, step: int) -> list[Task]:
        """As :meth:`TaskStream.spares`, without tasks that rest while there are others."""
        return self._build_tasks(step, self._plan(step).spares, first_position=self.batch_size)

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Takes note of how the groups of ``step`` scored."""
        self._outcomes[step] = outcomes

    def count_resting(self, step: int) -> int:
        """Tasks that rested in the epoch in which the batch of ``step``, now chosen, ends."""
        return self._num_resting[step]

    def _plan(self, step: int) -> _Plan:
        while self._next_step <= step:
            planned, known = self._next_step, self._next_step - self._lag
            if known >= 1:
                if known not in self._outcomes:
                    raise RuntimeError(f"observe step {known} before step {planned} is chosen")
                self._take_in(self._plans.pop(known), self._outcomes.pop(known))
            self._plans[planned] = self._choose(planned)
            self._num_resting[planned] = len(self._list_resting())
            self._next_step += 1
        return self._plans[step]

    def _take_in(self, plan: _Plan, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            found = plan.find(outcome)
            if found is None or outcome.has_signal is None:
                continue
            row, epoch = found
            if outcome.has_signal:
                self._rests.pop(row, None)
                continue
            before = self._rests.get(row)
            num_in_a_row = before.num_in_a_row + 1 if before is not None else 1
            # 2 ** n grows without end, and nobody rests longer than the limit.
            rest = min(2 ** min(num_in_a_row - 1, 30), self._max_rest_epochs)
            self._rests[row] = _Rest(num_in_a_row, epoch + rest)

    def _choose(self, step: int) -> _Plan:
        batch: list[int] = []
        epochs: list[int] = []
        while len(batch) < self.batch_size:
            if self._offset == self._num_rows:
                self._epoch, self._offset = self._find_next_epoch(), 0
            row = self._order(self._epoch)[self._offset]
            self._offset += 1
            if not self._rests_now(row):
                batch.append(row)
                epochs.append(self._epoch)
        return _Plan(batch, self._choose_spares(step, batch, self._list_resting()), epochs)

    def _find_next_epoch(self) -> int:
        """The first after this one in which any task takes part."""
        following = self._epoch + 1
        if len(self._rests) < self._num_rows:
            return following
        return max(following, 1 + min(rest.last_epoch for rest in self._rests.values()))

    def _rests_now(self, row: int) -> bool:
        rest = self._rests.get(row)
        return rest is not None and rest.last_epoch >= self._epoch

    def _list_resting(self) -> list[int]:
        return [row for row in self._rests if self._rests_now(row)]


def build_task_stream(config: ExperimentConfig, rows: Sequence[Row]) -> TaskStream:
    """The training tasks of a run, with the curriculum that ``rollout.curriculum`` names."""
    dataset, curriculum = config.train_dataset, config.rollout.curriculum
    num_spares = config.resolve_max_replaced_groups()
    if curriculum is None:
        return TaskStream(
            rows,
            batch_size=dataset.batch_size,
            shuffle=dataset.shuffle,
            seed=config.seed,
            num_spares=num_spares,
        )
    return RestingTaskStream(
        rows,
        batch_size=dataset.batch_size,
        shuffle=dataset.shuffle,
        seed=config.seed,
        max_staleness=config.rollout.max_staleness,
        max_rest_epochs=curriculum.max_rest_epochs,
        num_spares=num_spares,
    )


def recall_outcomes(stream: TaskStream, folder: RunFolder, first_step: int) -> None:
    """Tells a stream that chooses by them what is stored of the steps before ``first_step``.

    Raises:
        RunFolderError: a step's trajectories are gone.
    """
    if not isinstance(stream, RestingTaskStream):
        return
    steps = range(1, first_step)
    missing = sorted(set(steps) - set(folder.trajectory_steps()))
    if missing:
        raise RunFolderError(
            f"{folder.path}: rollout.curriculum chooses tasks by what earlier steps showed of "
            f"them, and the trajectories of step {missing[0]} are gone ({len(missing)} of "
            f"{len(steps)} steps). Put the files back, or begin a new run: trial_name=NAME "
            "model.path=CHECKPOINT"
        )
    for step in steps:
        summaries = folder.list_trajectories(step)
        stream.batch(step)
        stream.observe(step, list_outcomes((t.group_id, t.task_id, t.score) for t in summaries))
