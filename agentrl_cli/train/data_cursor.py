"""Where a run stands in its dataset: saved with each checkpoint, checked when it goes on.

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

from agentrl_cli.errors import RunFolderError, StoreError

_NAME = "data_cursor.json"


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

    def save(self, checkpoint: Path, step: int) -> None:
        """Writes the cursor of a run whose last step is ``step``.

        Raises:
            StoreError: the folder cannot be written to.
        """
        cursor = {"next_step": step + 1, "num_rows": self.num_rows, "digest": self.digest}
        path = checkpoint / _NAME
        try:
            path.write_text(json.dumps(cursor, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"the checkpoint {checkpoint} cannot be written: {error}") from error

    def check(self, checkpoint: Path) -> None:
        """Refuses to go on from a checkpoint of a run on other rows.

        Raises:
            RunFolderError: with what to type.
            StoreError: the file is damaged.
        """
        path = checkpoint / _NAME
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
        raise RunFolderError(
            f"train_dataset {change}: which tasks were done could not be told any more (the "
            f"checkpoint is {checkpoint}). Put the old rows back, or begin a new run from its "
            f"weights: trial_name=NAME model.path={checkpoint}"
        )
