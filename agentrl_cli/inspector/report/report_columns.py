"""All trajectories of a run, column by column: what the page lists, filters and counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.errors import AgentrlError
from agentrl_cli.inspector.report.block_format import TextCodes, pack_columns
from agentrl_cli.inspector.trajectory_query import Source, list_sources
from agentrl_cli.log import sanitize
from agentrl_cli.store.layout import eval_name, proximal_path, step_name
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_file import (
    FileSize,
    SummaryColumns,
    read_size,
    read_summary_columns,
)

Numbers = np.ndarray[Any, Any]

#: Characters of a text that lists show and search.
MAX_TEXT = 200
#: Details are read in blocks of about so many bytes, before compression.
_BLOCK_BYTES = 256 * 1024
#: As many as a row group of a file has, which is read at once.
MAX_BLOCK_ROWS = 256

_MISMATCHES = "prefix_mismatches_json"
#: Texts that are numbered, under the names that the page has for them.
_CODED = {
    "group": "group_id", "task": "task_id", "agent": "agent_name", "replaced_by": "replaced_by",
    "stop": "stop_reason", "boundary": "failure_boundary", "cause": "failure_cause",
    "kind": "failure_kind", "mismatch": "mismatch", "id": "id",
}  # fmt: skip
_SEARCHED = {
    "question": "question", "expected": "expected", "answer": "final_answer",
    "failure": "failure_message",
}  # fmt: skip
_NUMBERS = {
    "sample": ("sample_index", np.int32), "reward": ("reward", np.float64),
    "score": ("score", np.float64), "cut": ("is_cut_short", np.uint8),
    "seconds": ("seconds", np.float32), "turns": ("num_turns", np.int32),
    "tokens": ("num_completion_tokens", np.int32), "calls": ("num_tool_calls", np.int32),
    "malformed": ("num_malformed_calls", np.int32), "mismatches": ("mismatches", np.int32),
    "logprob_mean": ("logprob_mean", np.float32), "logprob_min": ("logprob_min", np.float32),
    "logprob_gap_max": ("logprob_gap_max", np.float32),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReportSource:
    """A step or an evaluation as the page knows it."""

    folder: RunFolder
    source: Source
    columns: SummaryColumns | None = None
    size: FileSize | None = None
    problem: str | None = None
    """Why it cannot be read."""
    letter: str | None = None
    """What stands for it in a comparison."""

    @property
    def key(self) -> str:
        """Its name in addresses: its letter, else ``step-000012`` or ``eval-000020-label``."""
        return self.letter or name_source(self.source)

    @property
    def name(self) -> str:
        """Its name in lists."""
        return self.letter or self.source.name

    def find_file(self) -> Path:
        """Where it is stored."""
        return self.source.find_file(self.folder)

    @property
    def num_rows(self) -> int:
        """Its trajectories."""
        return 0 if self.columns is None else len(self.columns.texts["id"])

    @property
    def block_rows(self) -> int:
        """How many trajectories a block of its details has: a power of 2, so that blocks fill the
        row groups of its file."""
        each = max(self.size.bytes_per_row if self.size else 1.0, 1.0)
        return 1 << (max(min(int(_BLOCK_BYTES / each), MAX_BLOCK_ROWS), 1).bit_length() - 1)

    @property
    def num_blocks(self) -> int:
        """The blocks of its details."""
        return -(-self.num_rows // self.block_rows)

    def describe(self, start: int) -> dict[str, Any]:
        """For the page; ``start``: the number of its first trajectory."""
        return {
            "key": self.key,
            "name": self.name,
            "letter": self.letter,
            "isEval": self.source.is_eval,
            "step": self.source.step,
            "label": self.source.label,
            "start": start,
            "count": self.num_rows,
            "blockRows": self.block_rows,
            "problem": self.problem,
        }


def name_source(source: Source) -> str:
    """The name of its file, without its ending."""
    return eval_name(source.step, source.label) if source.is_eval else step_name(source.step)


def read_source(folder: RunFolder, source: Source, letter: str | None = None) -> ReportSource:
    """The trajectories of ``source``, or why they cannot be read."""
    try:
        path = source.find_file(folder)
        columns, size = _shorten(read_summary_columns(path)), read_size(path)
        return ReportSource(folder, source, columns, size, letter=letter)
    except (AgentrlError, OSError) as error:
        return ReportSource(folder, source, problem=sanitize(str(error)), letter=letter)


class SourceCache:
    """The files of a run that were read; those of a live run are read when they are new."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._known: dict[Source, tuple[Any, ReportSource]] = {}

    def read(self) -> Iterator[ReportSource]:
        """Every step and evaluation that is stored."""
        for source in list_sources(self._folder):
            version = self._read_version(source)
            known, found = self._known.get(source, (None, None))
            if found is None or version != known or found.problem:
                found = read_source(self._folder, source)
                self._known[source] = version, found
            yield found

    def _read_version(self, source: Source) -> Any:
        """What changes when its files do."""
        try:
            path = source.find_file(self._folder)
            # What the trainer computed is stored later than what was sampled.
            beside = proximal_path(path)
            states = [path.stat(), *([beside.stat()] if beside.exists() else [])]
        except (AgentrlError, OSError):
            return None
        return [(state.st_mtime_ns, state.st_size) for state in states]


def _shorten(columns: SummaryColumns) -> SummaryColumns:
    texts = columns.texts
    for name in _SEARCHED.values():
        texts[name] = [None if text is None else text[:MAX_TEXT] for text in texts[name]]
    texts["failure_message"] = [t and sanitize(t) for t in texts["failure_message"]]
    # Most ids say nothing that their group and place in it do not.
    samples = columns.numbers["sample_index"].astype(int)
    parts = zip(texts["id"], texts["group_id"], samples, strict=True)
    texts["id"] = [None if name == f"{group}/{n}" else name for name, group, n in parts]
    known = {text: _count_mismatches(text) for text in {*texts[_MISMATCHES]}}
    counts = [known[text] for text in texts.pop(_MISMATCHES)]
    texts["mismatch"] = [names for names, _ in counts]
    numbers = columns.numbers | {"mismatches": np.array([n for _, n in counts], np.float64)}
    return SummaryColumns(texts, numbers)


def _count_mismatches(text: str | None) -> tuple[str | None, int]:
    """``history_edited retokenized``, and how many turns."""
    by_cause: Mapping[str, Mapping[str, int]] = json.loads(text or "{}").get("by_cause", {})
    return " ".join(by_cause) or None, sum(each["num_turns"] for each in by_cause.values())


class RunColumns:
    """The trajectories of all sources, one after the other, in columns by the page's names."""

    def __init__(self, sources: list[ReportSource]) -> None:
        self.sources = sources
        self.starts = [0, *accumulate(s.num_rows for s in sources)]
        self._read = [s.columns for s in sources if s.columns is not None]
        self.texts: dict[str, list[str]] = {}
        self.columns: dict[str, Numbers] = {}
        for name, column in {**_CODED, **_SEARCHED}.items():
            codes = TextCodes()
            self.columns[name] = self._join(codes.encode(c.texts[column]) for c in self._read)
            self.texts[name] = codes.list_texts()
        for name, (column, dtype) in _NUMBERS.items():
            joined = self._join(c.numbers[column] for c in self._read)
            if np.issubdtype(dtype, np.integer):
                joined = np.nan_to_num(joined)
            self.columns[name] = joined.astype(dtype)

    @staticmethod
    def _join(parts: Iterator[Numbers]) -> Numbers:
        found = [*parts]
        return np.concatenate(found) if found else np.zeros(0, np.int32)

    @property
    def num_rows(self) -> int:
        """All trajectories."""
        return self.starts[-1]

    @cached_property
    def source_numbers(self) -> Numbers:
        """Of every trajectory: the position of its source in ``sources``."""
        return np.repeat(np.arange(len(self.sources)), np.diff(self.starts))

    @cached_property
    def is_eval(self) -> Numbers:
        """Of every trajectory: whether an evaluation made it."""
        flags = np.array([s.source.is_eval for s in self.sources], dtype=bool)
        return flags[self.source_numbers]

    def describe_sources(self) -> list[dict[str, Any]]:
        """For the page."""
        return [s.describe(start) for s, start in zip(self.sources, self.starts, strict=False)]

    def pack(self, version: int = 0) -> dict[str, bytes]:
        """The blocks ``summary`` (for lists, filters and maps) and ``texts`` (for searching).

        ``version`` tells those of one state of a live run from those of the next.
        """
        searched = {name: self.columns[name] for name in _SEARCHED}
        others = {name: c for name, c in self.columns.items() if name not in _SEARCHED}
        return {
            name: pack_columns(
                columns, {"version": version, "texts": {n: self.texts[n] for n in coded}}
            )
            for name, columns, coded in (
                ("summary", others, _CODED),
                ("texts", searched, _SEARCHED),
            )
        }
