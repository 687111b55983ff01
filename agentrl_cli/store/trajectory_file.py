"""One parquet file of trajectories: written completely or not at all, read column by column.

Its columns are those of ``trajectory_record.py``, and what lists and filters need of a trajectory.
Ids, log-probabilities and versions are lists of numbers; what has a free form (messages, tools,
dataset rows) is JSON text; floats are float64, so that they come back bit for bit. Texts lose
nothing but lone surrogates, which no UTF-8 holds. The footer has the totals of the file,
and of which groups a resumed run still has to make steps.

What the trainer computes for the tokens of a step is known when that file is long complete: it has
one of its own beside it, in which each list belongs to an interaction of the step.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from agentrl_cli.errors import StoreError
from agentrl_cli.prefix_mismatches import MismatchSummary, summarize_prefix_mismatches
from agentrl_cli.records import Boundary, FailureCause, StopReason, Trajectory
from agentrl_cli.scores import compute_score
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import atomic_file, store_errors
from agentrl_cli.store.trajectory_record import (
    ARRAYS,
    CALL_COLUMNS,
    COLUMNS,
    JSON_ENDING,
    Kind,
    as_array,
    build_row,
    parse_row,
    read_column,
    write_json,
)
from agentrl_cli.store.trajectory_summary import (
    OpenRounds,
    TrajectorySummary,
    TrajectoryTotals,
    parse_open_rounds,
)

FORMAT_VERSION = "3"
_FORMAT = b"agentrl_format"
_TOTALS = b"agentrl_totals"
_OPEN_ROUNDS = b"agentrl_open_rounds"

#: Computed when a trajectory is written, for who reads no interactions.
_COMPUTED: Mapping[str, Kind] = {
    "score": "float", "question": "text", "expected": "text", "is_cut_short": "bool",
    "num_turns": "int", "num_prompt_tokens": "int", "num_completion_tokens": "int",
    "num_tool_calls": "int", "num_malformed_calls": "int", "prefix_mismatches_json": "json",
}  # fmt: skip

_TYPES: dict[Kind, pa.DataType] = {
    "text": pa.string(),
    "json": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "ints": pa.list_(pa.int32()),
    "floats": pa.list_(pa.float64()),
    "texts": pa.list_(pa.string()),
}
_TYPES["calls"] = pa.list_(pa.struct([(n, _TYPES[k]) for n, k in CALL_COLUMNS.items()]))
SCHEMA = pa.schema([(name, _TYPES[kind]) for name, kind in {**COLUMNS, **_COMPUTED}.items()])

_PROXIMAL = "proximal_logprobs"
_PROXIMAL_TYPE = pa.list_(pa.float32())
_PROXIMAL_SCHEMA = pa.schema([("interaction_id", pa.string()), (_PROXIMAL, _PROXIMAL_TYPE)])

_SUMMARY = tuple(field.name for field in fields(TrajectorySummary))
_MISMATCHES = "prefix_mismatches"
_LOGPROBS = "interactions.list.element.rollout_logprobs"
_CALL_IDS = "interactions.list.element.id"
_ENUMS: Mapping[str, Callable[[str], Any]] = {
    "stop_reason": StopReason,
    "failure_boundary": Boundary,
    "failure_cause": FailureCause,
    _MISMATCHES: lambda text: MismatchSummary.from_dict(json.loads(text)),
}

#: By interaction id, of those that the trainer passed forward: in nats, before the step's update,
#: one for each completion token, NaN for a token that nothing stands before.
ProximalLogprobs: TypeAlias = Mapping[str, npt.NDArray[np.float32]]

#: Rows that are turned into columns at a time, which take many times the memory of columns.
_ROWS_AT_A_TIME = 64
#: Rows that are read at once where one is wanted.
_ROWS_PER_GROUP = 256


def write_trajectory_file(
    path: Path, trajectories: Sequence[Trajectory], open_rounds: OpenRounds | None = None
) -> None:
    """Writes all of ``trajectories``, or leaves ``path`` as it was.

    Raises:
        StoreError: the disk is full, or the folder cannot be written to.
    """
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer,
    ):
        for start in range(0, len(trajectories), _ROWS_PER_GROUP):
            group = trajectories[start : start + _ROWS_PER_GROUP]
            parts = range(0, len(group), _ROWS_AT_A_TIME)
            tables = [_build_table(group[part : part + _ROWS_AT_A_TIME]) for part in parts]
            writer.write_table(pa.concat_tables(tables), row_group_size=_ROWS_PER_GROUP)
        totals = write_json(TrajectoryTotals.of(trajectories).to_dict())
        rounds = write_json(open_rounds or {})
        footer = {_FORMAT: FORMAT_VERSION, _TOTALS: totals, _OPEN_ROUNDS: rounds}
        writer.add_key_value_metadata(footer)


def write_proximal_file(path: Path, logprobs: ProximalLogprobs) -> None:
    """Writes the proximal logprobs of the trajectory file ``path``, by interaction id, beside it.

    Raises:
        StoreError: the disk is full, or the folder cannot be written to.
    """
    values = np.concatenate([np.zeros(0, np.float32), *logprobs.values()])
    offsets = _find_offsets([len(each) for each in logprobs.values()])
    lists = pa.ListArray.from_arrays(offsets, pa.array(values, pa.float32()))
    ids = _build_column([*logprobs], "text")
    with (
        atomic_file(layout.proximal_path(path)) as file,
        pq.ParquetWriter(file, _PROXIMAL_SCHEMA, compression="zstd") as writer,
    ):
        writer.write_table(pa.table([ids, lists], schema=_PROXIMAL_SCHEMA))
        writer.add_key_value_metadata({_FORMAT: FORMAT_VERSION})


def read_proximal_logprobs(path: Path, interaction_ids: Sequence[str]) -> ProximalLogprobs:
    """Those of some interactions in the trajectory file ``path``; none of evaluations, and of runs
    whose version did not store them.

    Raises:
        StoreError: the file is damaged.
    """
    lists = _split_calls(_read_proximal(path, _build_column(interaction_ids, "text")))
    return {name: each for name, each in zip(interaction_ids, lists, strict=True) if len(each)}


def _read_proximal(path: Path, ids: pa.Array) -> pa.ListArray:
    """A list for each of the interactions, null where there is none."""
    path = layout.proximal_path(path)
    if not path.is_file():
        return pa.nulls(len(ids), _PROXIMAL_TYPE)
    with _opened(path) as file:
        table = file.read()
        numbers = pc.index_in(ids, value_set=table["interaction_id"].combine_chunks())
        return table[_PROXIMAL].combine_chunks().take(numbers)


def read_trajectory_file(path: Path) -> list[Trajectory]:
    """The trajectories of one file, equal in every field to those written.

    Raises:
        StoreError: the file is missing or damaged.
    """
    return [*iterate_trajectory_file(path)]


def iterate_trajectory_file(path: Path) -> Iterator[Trajectory]:
    """As :func:`read_trajectory_file`, a few at a time: a file may be larger than the memory."""
    with _opened(path) as file:
        # Row by row: as Python's own numbers the columns of a step would take gigabytes.
        for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=[*COLUMNS]):
            yield from map(_parse_row, batch.to_pylist())


def read_trajectory(path: Path, number: int) -> Trajectory:
    """The trajectory at a position of the file, from 0.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _opened(path) as file:
        group = file.read_row_group(number // _ROWS_PER_GROUP, columns=[*COLUMNS])
        [row] = group.slice(number % _ROWS_PER_GROUP, 1).to_pylist()
        return _parse_row(row)


def _parse_row(row: dict[str, Any]) -> Trajectory:
    calls = row["interactions"]
    row["interactions"] = {name: [call[name] for call in calls] for name in CALL_COLUMNS}
    return parse_row(row)


def read_totals(path: Path) -> TrajectoryTotals:
    """The totals of a file, which are in its footer.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _opened(path) as file:
        return TrajectoryTotals.from_dict(json.loads(file.metadata.metadata[_TOTALS]))


def read_open_rounds(path: Path) -> OpenRounds:
    """The open rounds that were given with a step's trajectories.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _opened(path) as file:
        return parse_open_rounds(json.loads(file.metadata.metadata[_OPEN_ROUNDS]))


def read_summaries(path: Path, numbers: Sequence[int] | None = None) -> list[TrajectorySummary]:
    """The trajectories at these positions of the file, in this order, or all; without tokens and
    messages.

    Raises:
        StoreError: the file is missing or damaged.
    """
    columns = [_find_column(name) for name in _SUMMARY]
    with _opened(path) as file:
        if numbers is None:
            rows = file.read(columns=columns)
        else:
            groups = sorted({number // _ROWS_PER_GROUP for number in numbers})
            first = {group: n * _ROWS_PER_GROUP for n, group in enumerate(groups)}
            places = (first[n // _ROWS_PER_GROUP] + n % _ROWS_PER_GROUP for n in numbers)
            rows = file.read_row_groups(groups, columns=columns).take([*places])
        return [
            TrajectorySummary(**{name: _parse(name, row[_find_column(name)]) for name in _SUMMARY})
            for row in rows.to_pylist()
        ]


class Matches(NamedTuple):
    """The trajectories of a file that passed."""

    num_matching: int
    numbers: list[int]
    """The positions of the first of them, in order."""
    keys: list[float]
    """What those were sorted by, NaN where there is no value; zeros if by nothing."""


def find_matches(
    path: Path,
    conditions: Mapping[str, Callable[[Any], bool]],
    sort_by: str | None = None,
    *,
    ascending: bool = False,
    limit: int | None = None,
) -> Matches:
    """The trajectories of a file that pass; only the columns that are named are read.

    Args:
        path: the file.
        conditions: what is asked of a field of :class:`TrajectorySummary`. Each of its values is
            asked about once, however many trajectories have it.
        sort_by: the field by which they are sorted, those without a value last; None: as stored.
        ascending: smallest first.
        limit: how many are given; None: all.

    Raises:
        StoreError: the file is missing or damaged.
    """
    names = {*conditions, *([] if sort_by is None else [sort_by])}
    with _opened(path) as file:
        table = file.read(columns=[_find_column(name) for name in sorted(names)])
        passes = np.ones(file.metadata.num_rows, dtype=bool)
        for name, accepts in conditions.items():
            values = table[_find_column(name)].combine_chunks().dictionary_encode()
            known = [_parse(name, value) for value in values.dictionary.to_pylist()]
            # The last verdict is of rows without a value.
            known += [None] if values.null_count else []
            verdicts = np.array([*map(accepts, known)], dtype=bool)
            passes &= verdicts[values.indices.fill_null(len(known) - 1).to_numpy()]
        numbers = np.flatnonzero(passes)
        keys = np.zeros(len(numbers))
        if sort_by is not None:
            keys = table[sort_by].to_numpy()[numbers].astype(float)
            order = np.argsort(keys if ascending else -keys, kind="stable")
            numbers, keys = numbers[order], keys[order]
        return Matches(len(numbers), numbers[:limit].tolist(), keys[:limit].tolist())


class SummaryColumns(NamedTuple):
    """All trajectories of a file, column by column: what summaries hold, in their order."""

    texts: dict[str, list[str | None]]
    numbers: dict[str, np.ndarray[Any, Any]]
    """float64, NaN where there is no value; also ``logprob_mean`` and ``logprob_min`` over the
    sampled tokens of a trajectory, and ``logprob_gap_max``, the largest |rollout - proximal|."""


def read_summary_columns(path: Path) -> SummaryColumns:
    """As :func:`read_summaries`, for who looks at all of a large run.

    Raises:
        StoreError: the file is missing or damaged.
    """
    names = [_find_column(name) for name in _SUMMARY]
    with _opened(path) as file:
        table = file.read(columns=[*names, _CALL_IDS, _LOGPROBS])
        texts: dict[str, list[str | None]] = {}
        numbers: dict[str, np.ndarray[Any, Any]] = {}
        for name in names:
            if pa.types.is_string(table.schema.field(name).type):
                texts[name] = table[name].to_pylist()
            else:
                values = table[name].cast(pa.float64()) if table[name].null_count else table[name]
                numbers[name] = values.to_numpy().astype(np.float64)
        calls = table["interactions"].combine_chunks()
        logprobs = calls.values.field("rollout_logprobs")
        ends = logprobs.offsets.to_numpy()[calls.offsets.to_numpy()]
    proximal = _read_proximal(path, calls.values.field("id"))
    return SummaryColumns(texts, numbers | _measure_logprobs(logprobs, proximal, ends))


def _measure_logprobs(
    rollout: pa.ListArray, proximal: pa.ListArray, ends: np.ndarray[Any, Any]
) -> dict[str, Any]:
    """Mean, smallest and largest gap of the values between each two of ``ends``."""
    lengths = np.diff(ends)
    mean, smallest, gap = np.full((3, len(lengths)), np.nan)
    has_any = lengths > 0
    if has_any.any():
        logprobs, starts = rollout.values.to_numpy(zero_copy_only=False), ends[:-1][has_any]
        with np.errstate(invalid="ignore"):
            mean[has_any] = np.add.reduceat(logprobs, starts) / lengths[has_any]
            smallest[has_any] = np.minimum.reduceat(logprobs, starts)
            gap[has_any] = np.fmax.reduceat(_compute_gaps(logprobs, rollout, proximal), starts)
    return {"logprob_mean": mean, "logprob_min": smallest, "logprob_gap_max": gap}


def _compute_gaps(
    logprobs: np.ndarray[Any, Any], rollout: pa.ListArray, proximal: pa.ListArray
) -> np.ndarray[Any, Any]:
    """|rollout - proximal| of all tokens, NaN where the trainer has computed nothing."""
    lengths = rollout.value_lengths()
    is_known = pc.fill_null(pc.equal(lengths, proximal.value_lengths()), False)
    has_gap = np.repeat(is_known.to_numpy(zero_copy_only=False), lengths.to_numpy())
    gaps = np.full(len(logprobs), np.nan)
    known = proximal.filter(is_known).flatten().to_numpy(zero_copy_only=False)
    gaps[has_gap] = np.abs(logprobs[has_gap] - known)
    return gaps


def read_rows(path: Path, start: int, stop: int) -> list[dict[str, Any]]:
    """The rows from ``start`` up to ``stop`` as ``build_row`` of ``trajectory_record.py`` makes
    them; the numbers of a call are arrays, as are its ``proximal_logprobs`` (empty: it has none).
    Many times faster than making trajectories of them.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _opened(path) as file:
        stop = min(stop, file.metadata.num_rows)
        first = start // _ROWS_PER_GROUP
        groups = [*range(first, -(-stop // _ROWS_PER_GROUP))]
        table = file.read_row_groups(groups, columns=[*COLUMNS])
        table = table.slice(start - first * _ROWS_PER_GROUP, stop - start)
        rows: list[dict[str, Any]] = table.drop_columns(["interactions"]).to_pylist()
        calls = table["interactions"].combine_chunks()
        ends = calls.offsets.to_numpy()
        structs = calls.values.slice(ends[0], ends[-1] - ends[0])
        columns = {name: _split_calls(structs.field(name)) for name in CALL_COLUMNS}
    columns[_PROXIMAL] = _split_calls(_read_proximal(path, structs.field("id")))
    ends = ends - ends[0]
    for number, row in enumerate(rows):
        own = slice(ends[number], ends[number + 1])
        row["interactions"] = {name: values[own] for name, values in columns.items()}
    return rows


def _split_calls(values: pa.Array) -> list[Any]:
    if not pa.types.is_list(values.type):
        return values.to_pylist()
    ends, numbers = values.offsets.to_numpy(), values.values.to_numpy(zero_copy_only=False)
    return [numbers[start:end] for start, end in pairwise(ends)]


class FileSize(NamedTuple):
    """How much a file holds."""

    num_rows: int
    bytes_per_row: float
    """Not compressed."""


def read_size(path: Path) -> FileSize:
    """The size of a file, which is in its footer.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _opened(path) as file:
        meta = file.metadata
        total = sum(meta.row_group(n).total_byte_size for n in range(meta.num_row_groups))
        return FileSize(meta.num_rows, total / max(meta.num_rows, 1))


def _find_column(name: str) -> str:
    """The column of a field of a summary."""
    return name if name in SCHEMA.names else name + JSON_ENDING


def _parse(name: str, value: Any) -> Any:
    return _ENUMS[name](value) if value is not None and name in _ENUMS else value


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    if not path.is_file():
        raise StoreError(f"{layout.describe(path)}: there is no such file")
    try:
        with store_errors(path, "read"), pq.ParquetFile(path) as file:
            if (file.metadata.metadata or {}).get(_FORMAT) != FORMAT_VERSION.encode():
                raise ValueError(f"its format is not {FORMAT_VERSION}")
            yield file
    except (pa.ArrowException, KeyError, TypeError, ValueError, StoreError) as error:
        raise StoreError(
            f"{layout.describe(path)}: is damaged, or was written by another version of agentrl "
            f"({type(error).__name__}: {error}). The other steps of the run can still be read"
        ) from error


def _build_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    rows = []
    for trajectory in trajectories:
        row = build_row(trajectory)
        mismatches = summarize_prefix_mismatches([trajectory])
        row["score"] = compute_score(trajectory)
        row["num_prompt_tokens"] = sum(len(i.prompt_ids) for i in trajectory.interactions)
        row["prefix_mismatches_json"] = write_json(mismatches.to_dict())
        missing = ((name, kind) for name, kind in _COMPUTED.items() if name not in row)
        rows.append(row | {name: read_column(trajectory, name, kind) for name, kind in missing})
    columns = {
        name: _build_column([row[name] for row in rows], kind)
        for name, kind in {**COLUMNS, **_COMPUTED}.items()
        if kind != "calls"
    }
    calls = [row["interactions"] for row in rows]
    fields = {
        name: _build_column([*chain.from_iterable(call[name] for call in calls)], kind)
        for name, kind in CALL_COLUMNS.items()
    }
    structs = pa.StructArray.from_arrays([*fields.values()], names=[*fields])
    columns["interactions"] = pa.ListArray.from_arrays(
        _find_offsets([len(call["id"]) for call in calls]), structs
    )
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _build_column(values: Sequence[Any], kind: Kind) -> pa.Array:
    if kind in ARRAYS:
        # Whole arrays, and not number by number.
        numbers = array(ARRAYS[kind])
        for value in values:
            numbers += as_array(value, numbers.typecode)
        offsets = _find_offsets([len(value) for value in values])
        return pa.ListArray.from_arrays(offsets, pa.array(np.asarray(numbers)))
    if kind == "text":
        values = [None if v is None else _replace_surrogates(v) for v in values]
    return pa.array(values, _TYPES[kind])


def _find_offsets(lengths: Sequence[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


def _replace_surrogates(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
