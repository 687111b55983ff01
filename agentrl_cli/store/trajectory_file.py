"""One parquet file of trajectories: written completely or not at all, read column by column.

Ids, log-probabilities and versions are lists of numbers; what has a free form
(messages, tools, dataset rows) is JSON text; floats are float64, so that they
come back bit for bit. Texts lose nothing but lone surrogates, which no UTF-8 holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl_cli.errors import StoreError
from agentrl_cli.prefix_mismatches import MismatchSummary, summarize_prefix_mismatches
from agentrl_cli.records import (
    Boundary,
    Failure,
    FailureCause,
    Interaction,
    InteractionStatus,
    MismatchCause,
    SharedSequence,
    StopReason,
    Trajectory,
)
from agentrl_cli.scores import compute_score
from agentrl_cli.store.atomic_files import atomic_file, store_errors

FORMAT_VERSION = "1"

#: What a column's name ends with if it holds JSON.
_JSON = "_json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySummary:
    """What a list shows of a trajectory: everything but its tokens and messages."""

    id: str
    group_id: str
    task_id: str
    sample_index: int
    step: int
    replaced_by: str | None = None
    """The group that took its group's place; None also in files of versions without this."""
    agent_name: str | None
    reward: float | None
    score: float | None = None
    """What groups are compared by; None: unscored, or a file of a version without this."""
    question: str = ""
    """Empty also in files of versions without this, as what follows."""
    expected: str = ""
    final_answer: str | None
    stop_reason: StopReason | None = None
    is_cut_short: bool = False
    failure_boundary: Boundary | None
    failure_cause: FailureCause | None = None
    """None also in files of versions without this."""
    failure_kind: str | None
    failure_message: str | None
    seconds: float
    num_turns: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_tool_calls: int
    num_malformed_calls: int = 0
    prefix_mismatches: MismatchSummary


#: Of the columns whose text is a member of an enumeration.
_ENUMS: Mapping[str, type[StrEnum]] = {
    "mismatch_cause": MismatchCause,
    "status": InteractionStatus,
    "stop_reason": StopReason,
    "failure_boundary": Boundary,
    "failure_cause": FailureCause,
}

_Record = TypeVar("_Record", Trajectory, Interaction, TrajectorySummary)

_INTERACTION = pa.struct(
    [
        ("id", pa.string()),
        ("parent_id", pa.string()),
        ("extends_parent", pa.bool_()),
        ("mismatch_cause", pa.string()),
        ("messages_json", pa.string()),
        ("tools_json", pa.string()),
        ("reply_json", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float64())),
        ("versions", pa.list_(pa.int64())),
        ("num_reported_tokens", pa.int64()),
        ("has_malformed_call", pa.bool_()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("structural_tag", pa.string()),
        ("finish_reason", pa.string()),
        ("status", pa.string()),
        ("error", pa.string()),
        ("started", pa.int64()),
        ("ended", pa.int64()),
        ("started_at", pa.float64()),
        ("seconds", pa.float64()),
        ("reward", pa.float64()),
        ("turn_return", pa.float64()),
    ]
)

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample_index", pa.int64()),
        ("step", pa.int64()),
        ("replaced_by", pa.string()),
        ("agent_name", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.float64()),
        ("reward_parts_json", pa.string()),
        ("export_style", pa.string()),
        ("question", pa.string()),
        ("expected", pa.string()),
        ("final_answer", pa.string()),
        ("stop_reason", pa.string()),
        ("is_cut_short", pa.bool_()),
        ("failure_boundary", pa.string()),
        ("failure_cause", pa.string()),
        ("failure_kind", pa.string()),
        ("failure_message", pa.string()),
        ("failure_traceback", pa.string()),
        ("seconds", pa.float64()),
        ("reward_seconds", pa.float64()),
        ("num_turns", pa.int64()),
        ("num_prompt_tokens", pa.int64()),
        ("num_completion_tokens", pa.int64()),
        ("num_tool_calls", pa.int64()),
        ("num_malformed_calls", pa.int64()),
        ("prefix_mismatches_json", pa.string()),
        ("task_json", pa.string()),
        ("interactions", pa.list_(_INTERACTION)),
    ],
    metadata={"agentrl_format": FORMAT_VERSION},
)

#: Rows that are turned into columns at a time: bounds the memory of writing a large step.
_ROWS_PER_GROUP = 64


def write_trajectory_file(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Writes all of ``trajectories``, or leaves ``path`` as it was.

    Raises:
        StoreError: the disk is full, or the folder cannot be written to.
    """
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer,
    ):
        for start in range(0, len(trajectories), _ROWS_PER_GROUP):
            rows = [_to_row(t) for t in trajectories[start : start + _ROWS_PER_GROUP]]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))


def read_trajectory_file(path: Path) -> list[Trajectory]:
    """The trajectories of one file, equal in every field to those written.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _reading(path):
        return [_from_row(row) for row in pq.read_table(path, partitioning=None).to_pylist()]


def read_summaries(path: Path) -> list[TrajectorySummary]:
    """As :func:`read_trajectory_file`, reading the scalar columns only."""
    names = [field.name for field in fields(TrajectorySummary)]
    with _reading(path):
        stored = set(pq.read_schema(path).names)
        columns = [name for name in (*names, *(n + _JSON for n in names)) if name in stored]
        rows = pq.read_table(path, columns=columns, partitioning=None).to_pylist()
        return [_to_summary(row) for row in rows]


def _to_summary(row: Mapping[str, Any]) -> TrajectorySummary:
    mismatches = MismatchSummary.from_dict(json.loads(row["prefix_mismatches_json"]))
    return _from_columns(TrajectorySummary, row, prefix_mismatches=mismatches)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    if not path.is_file():
        raise StoreError(f"{path}: there is no such file")
    try:
        with store_errors(path, "read"):
            yield
    except (pa.ArrowException, KeyError, TypeError, ValueError, StoreError) as error:
        raise StoreError(
            f"{path}: is damaged, or was written by another version of agentrl "
            f"({type(error).__name__}: {error}). The other steps of the run can still be read"
        ) from error


def format_record(trajectory: Trajectory) -> bytes:
    """The trajectory's row as one line of JSON."""
    return _to_json(_to_row(trajectory)).encode()


def parse_record(record: bytes) -> Trajectory:
    """The trajectory of :func:`format_record`.

    Raises:
        KeyError, TypeError, ValueError: it was written by another version.
    """
    return _from_row(json.loads(record))


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    """One row of the file."""
    failure = trajectory.failure
    return _to_columns(
        trajectory,
        SCHEMA,
        {
            "score": compute_score(trajectory),
            "failure_boundary": failure and failure.boundary,
            "failure_cause": failure and failure.cause,
            "failure_kind": failure and failure.kind,
            "failure_message": failure and failure.message,
            "failure_traceback": failure and failure.traceback,
            "num_prompt_tokens": sum(len(i.prompt_ids) for i in trajectory.interactions),
            "prefix_mismatches_json": summarize_prefix_mismatches([trajectory]).to_dict(),
            "interactions": [_to_columns(i, _INTERACTION) for i in trajectory.interactions],
        },
    )


def _from_row(row: Mapping[str, Any]) -> Trajectory:
    """The trajectory of one row."""
    failure = None
    if row["failure_boundary"] is not None:
        failure = Failure(
            boundary=Boundary(row["failure_boundary"]),
            cause=FailureCause(row.get("failure_cause") or FailureCause.SURROUNDINGS),
            kind=row["failure_kind"],
            message=row["failure_message"],
            traceback=row["failure_traceback"],
        )
    interactions = tuple(_from_columns(Interaction, struct) for struct in row["interactions"])
    return _from_columns(Trajectory, row, failure=failure, interactions=interactions)


def _to_columns(
    record: object, columns: Iterable[pa.Field], computed: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """The value of each column: ``computed``, else the record's attribute of the same name."""
    row = {}
    for column in columns:
        name = column.name
        value = computed[name] if name in computed else getattr(record, name.removesuffix(_JSON))
        if value is not None:
            if isinstance(value, SharedSequence):
                value = tuple(value)
            if name.endswith(_JSON):
                value = _to_json(value)
            elif pa.types.is_string(column.type):
                value = value.encode("utf-8", "backslashreplace").decode()
            elif pa.types.is_floating(column.type):
                value = float(value)
        row[name] = value
    return row


def _from_columns(kind: type[_Record], row: Mapping[str, Any], **values: Any) -> _Record:
    """The record of a row; columns that an older version did not write get their defaults."""
    for name in (field.name for field in fields(kind) if field.name not in values):
        text = row.get(name + _JSON)
        if text is not None:
            values[name] = json.loads(text)
        elif name in row:
            values[name] = row[name]
            if name in _ENUMS and row[name] is not None:
                values[name] = _ENUMS[name](row[name])
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])
    return kind(**values)


def _to_json(value: Any) -> str:
    # ASCII, so that lone surrogates in messages are kept as escapes. A key that is no text
    # (a dataset row's number) becomes text, as JSON has no other keys.
    return json.dumps(value, default=_to_plain)


def _to_plain(value: Any) -> Any:
    """The nearest JSON value of something that a dataset row held: no row may fail to be saved."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value.tolist() if hasattr(value, "tolist") else repr(value)
