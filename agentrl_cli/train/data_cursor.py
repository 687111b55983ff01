"""Where a run stands in its dataset: saved when it begins and with each checkpoint, checked when
it goes on.

The tasks of a step are a function of the seed, the step and the rows, so the step is the place.
What must not have changed are the rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from agentrl_cli.errors import RolloutFailedError, RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.failures import check_batch_worked
from agentrl_cli.store import layout
from agentrl_cli.store.files import write_text
from agentrl_cli.store.run_folder import RunFolder


@dataclass(frozen=True, slots=True)
class DataCursor:
    """What is known again of the rows of ``train_dataset``."""

    num_rows: int
    digest: str

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        """That of the rows, in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            # By the type alone where a value is no JSON: its text may hold an address.
            text = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
            digest.update(text.encode() + b"\n")
        return cls(len(rows), digest.hexdigest())

    def save(self, folder: Path, step: int) -> None:
        """Writes the cursor of a run whose last step is ``step`` into its folder or a checkpoint.

        Raises:
            StoreError: the folder cannot be written to.
        """
        cursor = {"next_step": step + 1, "num_rows": self.num_rows, "digest": self.digest}
        write_text(folder / layout.DATA_CURSOR, json.dumps(cursor, indent=2) + "\n")

    def check(self, folder: Path, *, has_weights: bool) -> None:
        """Refuses to go on with a run on other rows, from a checkpoint (which ``has_weights``) or
        from its beginning.

        Raises:
            RunFolderError: with what to type.
            StoreError: the file is damaged.
        """
        path = folder / layout.DATA_CURSOR
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            num_rows, digest = saved["num_rows"], saved["digest"]
        except FileNotFoundError:
            # A version that did not look at the rows.
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{path} is damaged: {error!r}. Delete it if the rows of train_dataset are those "
                "that the run began with"
            ) from error
        if digest == self.digest:
            return
        change = (
            f"had {num_rows} rows and has {self.num_rows} now"
            if num_rows != self.num_rows
            else f"has {num_rows} rows as before, with other content or in another order"
        )
        new_run = f" from its weights: model.path={folder}" if has_weights else ":"
        raise RunFolderError(
            f"train_dataset {change}: which tasks were done could not be told any more ({path} "
            f"knows the old rows). Put them back, or begin a new run{new_run} trial_name=NAME"
        )


def open_cursor(folder: RunFolder, rows: Sequence[Mapping[str, Any]]) -> DataCursor:
    """The cursor of ``rows``, with which the run in ``folder`` begins or goes on.

    As long as nothing is there to go on with, rows may be mended.

    Raises:
        RunFolderError: the run began with other rows.
        StoreError: what it knows of them is damaged, or cannot be written.
    """
    cursor = DataCursor.of(rows)
    latest = folder.latest_checkpoint()
    if latest is not None:
        cursor.check(latest[1], has_weights=True)
    elif (first_step := find_first_rolled_step(folder, 1)) > 1 or read_unused(folder, first_step):
        cursor.check(folder.path, has_weights=False)
    cursor.save(folder.path, 0 if latest is None else latest[0])
    return cursor


def find_first_rolled_step(folder: RunFolder, first_step: int) -> int:
    """The first step from ``first_step`` on that has no stored trajectories to learn from.

    A batch that failed as a whole stopped the run and is rolled out anew: its cause may be gone.
    """
    stored = set(folder.trajectory_steps())
    step = first_step
    while step in stored:
        step += 1
    if step == first_step:
        return step
    try:
        check_batch_worked(folder.read_trajectories(step - 1), f"step {step - 1}")
    except RolloutFailedError:
        return step - 1
    return step


def read_unused(folder: RunFolder, first_step: int) -> list[Trajectory]:
    """What an interrupted run had finished of the steps from ``first_step`` on, which are rolled
    out now.

    Nothing where the batch of ``first_step`` had failed as a whole: what was made ahead of it, by
    the same agent and reward, is made anew too.
    """
    if first_step in folder.trajectory_steps():
        folder.discard_waiting()
        return []
    return folder.read_waiting(first_step)
