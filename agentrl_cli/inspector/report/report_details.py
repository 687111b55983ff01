"""Everything that is stored of trajectories, in blocks that the page reads when one is opened.

A row of a block is what ``store/trajectory_record.py`` makes of a trajectory, in which nothing is
written twice; ``assets/conversation.js`` reads it. Lists of numbers are their lengths and their
items as base64: int32, and log-probabilities as int16 in thousandths of a nat, which is what the
page shows of them. The gaps between engine and trainer, mostly smaller than that, are float32 of
three digits, which compress well.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_cli.inspector.report.block_format import pack_json
from agentrl_cli.inspector.report.report_columns import MAX_BLOCK_ROWS
from agentrl_cli.inspector.trajectory_view import Spell
from agentrl_cli.log import sanitize
from agentrl_cli.store.trajectory_file import read_rows

_IDS = ("new_prompt_ids", "completion_ids")
_LOGPROBS = "rollout_logprobs"
_MASKED = ("failure_message", "failure_traceback")
#: What no logprob is; also the place of NaN.
_NO_NUMBER = -32768
_LOWEST, _HIGHEST = -32.767, 32.767


class DetailReader:
    """Reads blocks of details, with the texts of their tokens where there is a tokenizer."""

    def __init__(self, spell: Spell | None) -> None:
        self._spell = spell
        self._spelled: dict[int, str] = {}

    def read_block(self, path: Path, start: int, stop: int) -> bytes:
        """The trajectories of a file from ``start`` up to ``stop``.

        Raises:
            StoreError: the file is missing or damaged.
        """
        return self._pack(read_rows(path, start, stop), start)

    def read_blocks(
        self, path: Path, num_rows: int, block_rows: int
    ) -> Iterator[tuple[int, bytes]]:
        """The number of trajectories and the content of every block of a file, which is read once.

        Raises:
            StoreError: the file is missing or damaged.
        """
        for first in range(0, num_rows, MAX_BLOCK_ROWS):
            rows = read_rows(path, first, min(first + MAX_BLOCK_ROWS, num_rows))
            for start in range(0, len(rows), block_rows):
                part = rows[start : start + block_rows]
                yield len(part), self._pack(part, first + start)

    def _pack(self, rows: list[dict[str, Any]], start: int) -> bytes:
        block: dict[str, Any] = {"start": start, "rows": rows}
        if self._spell is not None:
            block["tokens"] = self._spell_tokens(rows)
        for row in rows:
            for name in _MASKED:
                row[name] = row[name] and sanitize(row[name])
            row["interactions"] = _pack_calls(row["interactions"])
        return pack_json(block)

    def _spell_tokens(self, rows: list[dict[str, Any]]) -> Mapping[str, str]:
        assert self._spell is not None
        lists = [ids for row in rows for name in _IDS for ids in row["interactions"][name]]
        used = np.unique(np.concatenate(lists)).tolist() if lists else []
        for token_id in used:
            if token_id not in self._spelled:
                self._spelled[token_id] = self._spell(token_id) if token_id >= 0 else ""
        return {str(token_id): self._spelled[token_id] for token_id in used}


def _pack_calls(calls: dict[str, list[Any]]) -> dict[str, Any]:
    packed = dict(calls)
    for name in (*_IDS, "versions"):
        packed[name] = _pack(calls[name], "<i4")
    packed[_LOGPROBS] = _pack([_round(values) for values in calls[_LOGPROBS]], "<i2")
    pairs = zip(packed.pop("proximal_logprobs"), calls[_LOGPROBS], strict=True)
    packed["logprob_gaps"] = _pack([_subtract(*pair) for pair in pairs], "<f4")
    packed["new_messages"] = [numbers.tolist() for numbers in calls["new_messages"]]
    packed["error"] = [error and sanitize(error) for error in calls["error"]]
    return packed


def _round(logprobs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rounded = np.rint(np.clip(logprobs, _LOWEST, _HIGHEST) * 1000)
    return np.where(np.isnan(rounded), _NO_NUMBER, rounded)


def _subtract(
    proximal: np.ndarray[Any, Any], rollout: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """How far the trainer's logprobs are above the engine's; nothing where it has none."""
    if len(proximal) != len(rollout):
        return np.zeros(0)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray((proximal - rollout).astype(np.float16))


def _pack(lists: list[np.ndarray[Any, Any]], dtype: str) -> list[Any]:
    joined = np.concatenate(lists).astype(dtype) if lists else np.zeros(0, dtype)
    return [[len(values) for values in lists], base64.b64encode(joined.tobytes()).decode()]
