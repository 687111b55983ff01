"""Dataset rows, and the tasks of every step: a function of the seed and of what is stored."""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.errors import DatasetError, RunFolderError, format_nearest
from agentrl_cli.scores import compute_statistics
from agentrl_cli.store.run_folder import RunFolder

Row = dict[str, Any]

_ALLOWED = (
    "Allowed: a .jsonl, .json, .csv or .parquet file, a hub dataset such as openai/gsm8k, "
    "or module:function that returns rows"
)
#: Of a row: deeper ones are a mistake, and more than Python's own parsers and Arrow can take.
_MAX_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row, as one group of trajectories will attempt it."""

    task_id: str
    """The row's position in the unshuffled dataset, as text."""
    row: Mapping[str, Any]
    group_id: str
    """``<round>.<position>``: no two groups of a run share it. Groups that took the place of others
    have the positions after those of the round's own tasks."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rows that were chosen for one round."""

    batch: list[int]
    backup_tasks: list[int]
    epochs: list[int]
    """That of every row of the batch, where tasks have cooldowns."""


class TaskStream:
    """The tasks in their seeded order, the same for the same seed however often a run is resumed.

    They come in rounds of ``batch_size``, as many as a step is made of; without ``max_staleness``
    step k is made of round k.

    With ``max_cooldown_epochs``, a task is left out of the next epoch after a group without
    signal; of two, four, ... and at most so many epochs when the group after that has none
    either; and comes every epoch again once a group of it has signal. Round k is then also a
    function of the outcomes of the steps up to k - 1 - ``max_staleness``: those that are certain
    to be known when its first trajectory may begin. Every step's outcomes must be given to
    :meth:`observe` once, those from before an interruption too.

    Args:
        rows: the dataset.
        batch_size: tasks per step and round.
        shuffle: a new order every epoch, from ``seed``; else that of the rows.
        seed: see ``shuffle``.
        num_backup_tasks: tasks per round that may take the place of others of it.
        max_cooldown_epochs: see above; None: every task comes every epoch.
        max_staleness: see above.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        num_backup_tasks: int = 0,
        max_cooldown_epochs: int | None = None,
        max_staleness: int = 0,
    ) -> None:
        if not rows:
            raise DatasetError("the dataset has no rows: give one with at least one row")
        self._rows = rows
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._num_backup_tasks = num_backup_tasks
        self.max_cooldown_epochs = max_cooldown_epochs
        self._lag = max_staleness + 1
        self._orders: dict[int, list[int]] = {}
        self._outcomes: dict[int, Sequence[GroupOutcome]] = {}
        self._plans: dict[int, _Plan] = {}
        self._next_round = 1
        self._epoch = self._offset = 0
        self._cooldowns: dict[int, tuple[int, int]] = {}
        """By row: its groups without signal since the last one with it, and the last epoch in which
        it is left out."""
        self._num_cooling: dict[int, int] = {}

    def batch(self, number: int) -> list[Task]:
        """The tasks of a round (from 1), which continues into the next epoch where one ends."""
        return self._build_tasks(number, self._plan(number).batch, first_position=0)

    def backup_tasks(self, number: int) -> list[Task]:
        """Tasks that may take the place of others of a round, in order of use.

        Tasks that are neither in the round nor in cooldown, while there are any: drawn again for
        every round, or those that follow it where rows are not shuffled. They come in their
        own turn all the same.
        """
        chosen = self._plan(number).backup_tasks
        return self._build_tasks(number, chosen, first_position=self.batch_size)

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Takes note of how the groups of ``step`` scored."""
        if self.max_cooldown_epochs is not None:
            self._outcomes[step] = outcomes

    def count_cooling(self, number: int) -> int:
        """Tasks in cooldown in the epoch in which a round, already chosen, ends."""
        return self._num_cooling.get(number, 0)

    def _plan(self, number: int) -> _Plan:
        if number < 1:
            raise ValueError(f"rounds count from 1, found {number}")
        if self.max_cooldown_epochs is None:
            first = (number - 1) * self.batch_size
            places = [divmod(first + n, len(self._rows)) for n in range(self.batch_size)]
            batch = [self._order(epoch)[offset] for epoch, offset in places]
            return _Plan(batch, self._choose_backup_rows(number, batch), [])
        while self._next_round <= number:
            planned, known = self._next_round, self._next_round - self._lag
            if known >= 1:
                if known not in self._outcomes:
                    raise RuntimeError(f"observe step {known} before round {planned} is chosen")
                self._take_in(self._outcomes.pop(known), self.max_cooldown_epochs)
            self._plans[planned] = self._choose(planned)
            self._num_cooling[planned] = len(self._list_cooling())
            self._next_round += 1
        return self._plans[number]

    def _take_in(self, outcomes: Sequence[GroupOutcome], max_cooldown_epochs: int) -> None:
        for outcome in outcomes:
            number, position = parse_group_id(outcome.group_id)
            plan = self._plans[number]
            row = [*plan.batch, *plan.backup_tasks][position]
            # A program may have put a task of its own in the row's place.
            if outcome.task_id != str(row) or outcome.has_signal is None:
                continue
            if outcome.has_signal:
                self._cooldowns.pop(row, None)
                continue
            epoch = plan.epochs[min(position, len(plan.epochs) - 1)]
            num_before, _ = self._cooldowns.get(row, (0, 0))
            # 2 ** n grows without end, and no cooldown is longer than the limit.
            length = min(2 ** min(num_before, 30), max_cooldown_epochs)
            self._cooldowns[row] = (num_before + 1, epoch + length)

    def _choose(self, number: int) -> _Plan:
        batch: list[int] = []
        epochs: list[int] = []
        while len(batch) < self.batch_size:
            if self._offset == len(self._rows):
                self._epoch, self._offset = self._find_next_epoch(), 0
            row = self._order(self._epoch)[self._offset]
            self._offset += 1
            if not self._is_cooling(row):
                batch.append(row)
                epochs.append(self._epoch)
        return _Plan(batch, self._choose_backup_rows(number, batch, self._list_cooling()), epochs)

    def _find_next_epoch(self) -> int:
        """The first after this one in which any task takes part."""
        if len(self._cooldowns) < len(self._rows):
            return self._epoch + 1
        return max(self._epoch, min(last for _, last in self._cooldowns.values())) + 1

    def _is_cooling(self, row: int) -> bool:
        return row in self._cooldowns and self._cooldowns[row][1] >= self._epoch

    def _list_cooling(self) -> list[int]:
        return [row for row in self._cooldowns if self._is_cooling(row)]

    def _choose_backup_rows(
        self, number: int, batch: Sequence[int], left_out: Collection[int] = ()
    ) -> list[int]:
        """The rows of a round's backup tasks, in order of use; each once before any repeats.

        They are rows outside ``batch`` and ``left_out`` while there are any, else all rows.
        """
        count, num_rows = self._num_backup_tasks, len(self._rows)
        if count == 0:
            return []
        after = (batch[-1] + 1) % num_rows
        rows = [*range(after, num_rows), *range(after)]
        taken = {*batch, *left_out}
        fresh = [index for index in rows if index not in taken] or rows
        if not self._shuffle:
            return list(islice(cycle(fresh), count))
        generator = random.Random(f"{self._seed}/backup_tasks/{number}")
        drawn: list[int] = []
        left: list[int] = []
        while len(drawn) < count:
            left = left or list(fresh)
            # Of a generator's methods only random() gives the same numbers in every Python version.
            place = int(generator.random() * len(left))
            left[place], left[-1] = left[-1], left[place]
            drawn.append(left.pop())
        return drawn

    def _build_tasks(self, number: int, indices: Sequence[int], first_position: int) -> list[Task]:
        return [
            Task(
                task_id=str(index),
                row=self._rows[index],
                group_id=f"{number:06d}.{position:03d}",
            )
            for position, index in enumerate(indices, start=first_position)
        ]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            # Only the two epochs that a batch can touch are worth keeping.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1}
            order = list(range(len(self._rows)))
            if self._shuffle:
                # Sorting by random() and not shuffle(): of the two, only random() is
                # promised to give the same numbers in every Python version.
                generator = random.Random((self._seed << 32) + epoch)
                order.sort(key=[generator.random() for _ in order].__getitem__)
            self._orders[epoch] = order
        return self._orders[epoch]


def parse_group_id(group_id: str) -> tuple[int, int]:
    """The round of a group, and its position there."""
    number, _, position = group_id.partition(".")
    return int(number), int(position)


def build_task_stream(config: ExperimentConfig, rows: Sequence[Row]) -> TaskStream:
    """The training tasks of a run, with the curriculum that ``rollout.curriculum`` names."""
    dataset, curriculum = config.train_dataset, config.rollout.curriculum
    return TaskStream(
        rows,
        batch_size=dataset.batch_size,
        shuffle=dataset.shuffle,
        seed=config.seed,
        num_backup_tasks=config.resolve_max_backup_tasks(),
        max_cooldown_epochs=None if curriculum is None else curriculum.max_cooldown_epochs,
        max_staleness=config.rollout.max_staleness,
    )


def recall_outcomes(stream: TaskStream, folder: RunFolder, first_step: int) -> None:
    """Tells a stream with cooldowns what is stored of the steps before ``first_step``.

    Raises:
        RunFolderError: a step's trajectories are gone.
    """
    if stream.max_cooldown_epochs is None:
        return
    steps = range(1, first_step)
    missing = sorted(set(steps) - set(folder.trajectory_steps()))
    if missing:
        raise RunFolderError(
            f"{folder.location}: rollout.curriculum chooses tasks by what earlier steps showed of "
            f"them, and the trajectories of step {missing[0]} are gone ({len(missing)} of "
            f"{len(steps)} steps). Put the files back, or start a new run: trial_name=NAME "
            "model.path=CHECKPOINT"
        )
    for step in steps:
        summaries = folder.list_trajectories(step)
        stream.batch(step)
        stream.observe(step, list_outcomes((t.group_id, t.task_id, t.score) for t in summaries))


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """How the trajectories of one group scored."""

    group_id: str
    task_id: str
    has_signal: bool | None
    """False: all scored alike; None: fewer than two were scored, which shows nothing."""


def list_outcomes(scores: Iterable[tuple[str, str, float | None]]) -> list[GroupOutcome]:
    """The outcome of every group, from (group id, task id, score) of its trajectories."""
    groups: dict[tuple[str, str], list[float]] = {}
    for group_id, task_id, score in scores:
        groups.setdefault((group_id, task_id), []).extend(() if score is None else (score,))
    outcomes = []
    for (group_id, task_id), known in groups.items():
        has_signal = compute_statistics(known).has_signal if len(known) > 1 else None
        outcomes.append(GroupOutcome(group_id, task_id, has_signal))
    return outcomes


def build_eval_tasks(rows: Sequence[Mapping[str, Any]], name: str = "eval") -> list[Task]:
    """Every row once, in order, as the tasks of the evaluation that is stored as ``name``."""
    return [
        Task(task_id=str(index), row=row, group_id=f"{name}.{index:03d}")
        for index, row in enumerate(rows)
    ]


def load_rows(config: DatasetConfig, key: str) -> list[Row]:
    """The rows of a dataset; ``key`` is its config key (``train_dataset``), for messages.

    Raises:
        DatasetError: no such file, text that does not parse, a row that is not a mapping,
            no rows, or a hub dataset that cannot be fetched.
    """
    where = f"{key}.path: {config.path!r}"
    path = Path(config.path)
    reader = _READERS.get(path.suffix.lower())
    by_pass_rate = config.min_pass_rate is not None or config.max_pass_rate is not None
    # Of those that are chosen by it.
    limit = None if by_pass_rate else config.limit
    if reader is not None and path.is_file():
        try:
            rows = list(islice(reader(path), limit))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise DatasetError(
                f"{where} cannot be read: {error}. Allowed: text in UTF-8, or Parquet; write the "
                "file again"
            ) from None
    elif ":" in config.path:
        rows = _check_rows(_call_function(config, key), where, limit)
    elif is_on_hub(config):
        rows = _check_rows(_load_hub(config, key), where, limit)
    else:
        raise DatasetError(_describe_missing(path, where))
    if not rows:
        raise DatasetError(f"{where} has no rows: a dataset needs at least one")
    return _choose_by_pass_rate(rows, config, where)[: config.limit] if by_pass_rate else rows


def _choose_by_pass_rate(rows: list[Row], config: DatasetConfig, where: str) -> list[Row]:
    low = 0.0 if config.min_pass_rate is None else config.min_pass_rate
    high = 1.0 if config.max_pass_rate is None else config.max_pass_rate
    rates = [_read_pass_rate(row, f"{where}: row {number}") for number, row in enumerate(rows, 1)]
    chosen = [row for row, rate in zip(rows, rates, strict=True) if low <= rate <= high]
    if not chosen:
        raise DatasetError(
            f"{where}: none of {len(rows)} rows has a pass_rate from {low:g} to {high:g}; they "
            f"have {min(rates):g} to {max(rates):g}"
        )
    return chosen


def _read_pass_rate(row: Row, where: str) -> float:
    rate = row.get("pass_rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise DatasetError(
            f"{where} has no pass_rate (found {rate!r}), by which min_pass_rate and max_pass_rate "
            "choose. Measure it: agentrl eval --config FILE valid_dataset=null "
            "eval_gconfig.n_samples=8 --save-tasks tasks.jsonl; then give tasks.jsonl as the path"
        )
    return float(rate)


def is_on_hub(config: DatasetConfig) -> bool:
    """True where the rows would be fetched."""
    path = Path(config.path)
    is_local = ":" in config.path or path.suffix.lower() in _READERS or path.exists()
    return not is_local and _HUB_ID.match(config.path) is not None


def _describe_missing(path: Path, where: str) -> str:
    if path.is_dir():
        return f"{where} is a folder. {_ALLOWED}"
    if path.is_file():
        return f"{where}: files that end in {path.suffix!r} are not read. {_ALLOWED}"
    if path.exists():
        return f"{where} is a pipe or a device, which can be read only once. {_ALLOWED}"
    if not path.parent.is_dir():
        return f"{where}: no such file: there is no folder {str(path.parent)!r}. {_ALLOWED}"
    names = [p.name for p in path.parent.iterdir() if p.suffix.lower() in _READERS]
    beside = format_nearest(path.name, names) if names else "its folder has no file of rows"
    return f"{where}: no such file; {beside}. {_ALLOWED}"


def _check_rows(rows: Any, where: str, limit: int | None) -> list[Row]:
    """Rows from code: checked to be mappings, cut to ``limit``."""
    if isinstance(rows, Mapping | str) or not hasattr(rows, "__iter__"):
        raise DatasetError(
            f"{where}: expected a list of rows, found {type(rows).__name__}. Return a list of dicts"
        )
    return [
        _check_row(row, f"{where}: row {number}")
        for number, row in enumerate(islice(rows, limit), start=1)
    ]


def _check_row(row: Any, where: str) -> Row:
    if not isinstance(row, Mapping):
        raise DatasetError(
            f"{where} is {type(row).__name__}, not a mapping: every row must be an object such as "
            '{"question": "...", "answer": "..."}'
        )
    problem = _find_problem(row, _MAX_DEPTH)
    if problem:
        raise DatasetError(f"{where} {problem}")
    return dict(row)


def _find_problem(value: Any, levels: int) -> str | None:
    """What of a value can be neither stored nor tokenized, if anything."""
    if isinstance(value, str):
        if _SURROGATE.search(value):
            return (
                "holds half of a surrogate pair (such as \\ud83d), which is no character: write "
                "the file again with whole characters, or leave it out"
            )
    elif isinstance(value, Mapping | list | tuple):
        if levels == 0:
            return f"is nested deeper than {_MAX_DEPTH} levels: give deep values as JSON text"
        parts = [*value, *value.values()] if isinstance(value, Mapping) else value
        return next(filter(None, (_find_problem(part, levels - 1) for part in parts)), None)
    return None


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _check_row(
                    _parse_json(line.rstrip(), path, number), f"{path}:{number}: the row"
                )


def _parse_json(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise DatasetError(
            f"{path}:{first_line}: is nested deeper than {_MAX_DEPTH} levels: give deep values as "
            "JSON text"
        ) from None
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        hint = "; for one object per line, name the file .jsonl" if path.suffix == ".json" else ""
        raise DatasetError(
            f"{path}:{line}: not valid JSON: {error.msg} at column {error.colno}{hint}"
        ) from None
    except ValueError as error:
        raise DatasetError(f"{path}:{first_line}: not usable: {error}") from None


def _read_json(path: Path) -> Iterator[Row]:
    rows = _parse_json(path.read_text(encoding="utf-8-sig"), path, 1)
    yield from _check_rows(rows, str(path), None)


def _read_csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        for row in reader:
            if None in row or None in row.values():
                raise DatasetError(
                    f"{path}:{reader.line_num}: this row does not have the "
                    f"{len(reader.fieldnames or ())} columns of the header; quote values that "
                    "hold commas"
                )
            yield _check_row(row, f"{path}:{reader.line_num}: the row")


def _read_parquet(path: Path) -> Iterator[Row]:
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        for batch in batches:
            yield from _check_rows(batch.to_pylist(), str(path), None)
    except (importlib.import_module("pyarrow").ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: not a Parquet file, or a damaged one: {error}. Write or copy it again"
        ) from None


_READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _call_function(config: DatasetConfig, key: str) -> Any:
    function = import_object(config.path, f"{key}.path")
    where = f"{key}.path: {config.path!r}"
    if not callable(function):
        raise DatasetError(f"{where} is {type(function).__name__}, not a function. {_ALLOWED}")
    named = inspect.signature(function).parameters
    try:
        rows = function(split=config.split) if "split" in named else function()
        # A generator runs only now.
        return list(islice(rows, config.limit)) if inspect.isgenerator(rows) else rows
    except (Exception, SystemExit) as error:
        raise DatasetError(
            f"{where} raised {type(error).__name__}: {error}. It is called with split= if it "
            "names it, and with nothing else"
        ) from error


def _load_hub(config: DatasetConfig, key: str) -> Any:
    datasets = importlib.import_module("datasets")
    where = f"{key}.path: {config.path!r}"
    try:
        loaded = datasets.load_dataset(config.path, config.name, split=config.split)
    except Exception as error:
        raise DatasetError(
            f"{where} (name {config.name!r}, split {config.split!r}) could not be loaded from the "
            f"hub: {type(error).__name__}: {error}\nWithout internet, give a local file with the "
            f"same fields: {key}.path=FILE.jsonl (one JSON object per line)"
        ) from error
    if isinstance(loaded, Mapping):
        raise DatasetError(
            f"{where} has the splits {', '.join(map(str, loaded))}. Type {key}.split="
            f"{next(iter(loaded), 'train')}"
        )
    return loaded
