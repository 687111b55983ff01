"""One parquet file of trajectories: written whole and renamed, read column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl_cli.breaks import BreakSummary
from agentrl_cli.errors import StoreError
from agentrl_cli.records import Boundary, Trajectory
from agentrl_cli.store import schema
from agentrl_cli.store.files import atomic_file, store_errors

#: Rows that are turned into columns at a time: bounds the memory of writing a large step.
_ROWS_PER_GROUP = 64


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
    final_answer: str | None
    failure_boundary: Boundary | None
    failure_kind: str | None
    failure_message: str | None
    seconds: float
    num_turns: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_tool_calls: int
    breaks: BreakSummary


def write_trajectory_file(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Writes all of ``trajectories``, or leaves ``path`` as it was.

    Raises:
        StoreError: the disk is full, or the folder cannot be written to.
    """
    with (
        atomic_file(path) as file,
        pq.ParquetWriter(file, schema.SCHEMA, compression="zstd") as writer,
    ):
        for start in range(0, len(trajectories), _ROWS_PER_GROUP):
            rows = [schema.to_row(t) for t in trajectories[start : start + _ROWS_PER_GROUP]]
            writer.write_table(pa.Table.from_pylist(rows, schema=schema.SCHEMA))


def read_trajectory_file(path: Path) -> list[Trajectory]:
    """The trajectories of one file, equal in every field to those written.

    Raises:
        StoreError: the file is missing or damaged.
    """
    with _reading(path):
        table = pq.read_table(path, partitioning=None)
        return [schema.from_row(row) for row in table.to_pylist()]


def read_summaries(path: Path) -> list[TrajectorySummary]:
    """As :func:`read_trajectory_file`, reading the scalar columns only."""
    with _reading(path):
        stored = set(pq.read_schema(path).names)
        columns = [name for name in schema.SUMMARY_COLUMNS if name in stored]
        table = pq.read_table(path, columns=columns, partitioning=None)
        rows = table.to_pylist()
        for row in rows:
            boundary = row["failure_boundary"]
            row["failure_boundary"] = Boundary(boundary) if boundary is not None else None
            row["breaks"] = schema.parse_breaks(row.pop("breaks_json"))
        return [TrajectorySummary(**row) for row in rows]


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
