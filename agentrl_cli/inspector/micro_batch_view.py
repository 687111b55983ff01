"""A micro-batch that could not be trained on: its samples, and what in them is not finite."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl_cli.inspector.text import clean
from agentrl_cli.store.micro_batch_file import StoredMicroBatch, read_micro_batch

#: Rows of a table; what follows is counted.
_MAX_ROWS = 20


def inspect_micro_batch(path: Path, *, as_json: bool = False, console: Console) -> None:
    """Prints a saved micro-batch.

    Raises:
        RunFolderError: there is none.
        StoreError: it is damaged.
    """
    batch = read_micro_batch(path)
    if as_json:
        summary = {**batch.facts, "not_finite": _count_all(batch), "targets": list_bad(batch)}
        print(json.dumps(summary, indent=2, allow_nan=False))
        return
    facts = batch.facts
    console.print(Text(f"step {facts['step']}: {facts['what']}", style="bold"))
    for name in facts["weights_not_finite"]:
        console.print(Text(f"the weight {clean(name)} has values that are not finite", style="red"))
    console.print(_build_sample_table(batch))
    bad = list_bad(batch)
    if bad:
        console.print()
        console.print(_build_target_table(bad))
    else:
        console.print(Text(_describe_finite(batch), style="yellow"), soft_wrap=True)
    run = shlex.quote(str(path.resolve().parents[1]))
    first = facts["samples"][0]["trajectory_id"]
    for line in (
        f"a trajectory:  agentrl inspect-trajectories {run} {clean(first)} --tokens",
        f"all values:    {path / 'micro_batch.safetensors'} ({', '.join(sorted(batch.tensors))})",
    ):
        console.print(Text(line, style="dim"), soft_wrap=True)


def list_bad(batch: StoredMicroBatch) -> list[dict[str, Any]]:
    """The targets with a value that is not finite: where they are, and all their values.

    Values that are not finite are text (``nan``, ``inf``, ``-inf``), as JSON has no such numbers.
    """
    values = _list_values(batch)
    stacked = [~np.isfinite(value) for value in values.values()]
    is_bad = np.any(stacked, axis=0) if stacked else np.zeros(0, bool)
    rows = []
    start = 0
    for number, sample in enumerate(batch.facts["samples"], start=1):
        for target in range(sample["num_targets"]):
            place = start + target
            if not is_bad[place]:
                continue
            turn = next((t for t in sample["turns"] if t["start"] <= target < t["end"]), None)
            rows.append(
                {
                    "sample": number,
                    "trajectory_id": sample["trajectory_id"],
                    "interaction_id": turn and turn["interaction_id"],
                    "position": int(batch.tensors["sources"][place]) + 1,
                    "token_id": int(batch.tensors["ids"][place]),
                    **{name: _to_json(value[place]) for name, value in values.items()},
                }
            )
        start += sample["num_targets"]
    return rows


def _list_values(batch: StoredMicroBatch) -> dict[str, np.ndarray[Any, Any]]:
    """The numbers of the targets by name; whole ones say where a target lies, and of what."""
    return {name: value for name, value in batch.tensors.items() if value.dtype.kind == "f"}


def _describe_finite(batch: StoredMicroBatch) -> str:
    """Where no value is to blame alone: what overflows is made of the largest."""
    values = _list_values(batch)
    largest = {name: float(np.abs(value).max()) for name, value in values.items() if value.size}
    listed = ", ".join(f"{n} {v:.3g}" for n, v in sorted(largest.items(), key=lambda i: -i[1]))
    return (
        "every value of every target is finite: what is computed of them overflows, or the "
        f"gradient alone is not. The largest: {listed}"
    )


def _count_all(batch: StoredMicroBatch) -> dict[str, int]:
    return {name: int((~np.isfinite(v)).sum()) for name, v in _list_values(batch).items()}


def _build_sample_table(batch: StoredMicroBatch) -> Table:
    table = Table(box=None)
    for name in ("sample", "trajectory", "tokens", "trained tokens", "not finite"):
        table.add_column(name, justify="left" if name == "trajectory" else "right")
    num_bad: dict[int, int] = {}
    for row in list_bad(batch):
        num_bad[row["sample"]] = num_bad.get(row["sample"], 0) + 1
    for number, sample in enumerate(batch.facts["samples"], start=1):
        table.add_row(
            str(number),
            Text(clean(sample["trajectory_id"])),
            str(sample["num_tokens"]),
            str(sample["num_targets"]),
            Text(str(num_bad.get(number, 0)), style="red" if number in num_bad else ""),
        )
    return table


def _build_target_table(bad: list[dict[str, Any]]) -> Table:
    more = f", the first {_MAX_ROWS}" if len(bad) > _MAX_ROWS else ""
    title = f"trained tokens with a value that is not finite ({len(bad)}{more})"
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None)
    # What is the same for all tells nothing apart; columns of what is not finite come first.
    names = ["sample", "position", "token_id"]
    others = [name for name in bad[0] if name not in (*names, "trajectory_id", "interaction_id")]
    others.sort(key=lambda name: not any(isinstance(row[name], str) for row in bad))
    for name in (*names, *others):
        table.add_column(name, justify="right")
    for row in bad[:_MAX_ROWS]:
        table.add_row(*(_format_cell(row, name) for name in (*names, *others)))
    return table


def _format_cell(row: Mapping[str, Any], name: str) -> Text:
    value = row[name]
    if isinstance(value, str):
        return Text(value, style="red")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value))


def _to_json(value: Any) -> float | str:
    number = float(value)
    return number if np.isfinite(number) else str(number)
