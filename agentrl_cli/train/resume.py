"""What a run saves to be resumed, and where it stands when it is.

The tasks of a step are a function of the seed, the step and the rows of ``train_dataset``, so the
step is the place in the dataset. What must not have changed are the rows, and the chat template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl_cli.config.experiment import RolloutConfig
from agentrl_cli.config.train_config import TrainConfig
from agentrl_cli.errors import RolloutFailedError, RunFolderError, StoreError
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.rollout_failures import check_batch_worked
from agentrl_cli.store import layout
from agentrl_cli.store.atomic_files import write_text
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.run_outline import find_best_checkpoint, find_best_eval
from agentrl_cli.store.trajectory_summary import OpenRounds

if TYPE_CHECKING:
    from agentrl_cli.train.learner import Learner


@dataclass(frozen=True, slots=True)
class DataCursor:
    """By what the rows of ``train_dataset`` and the chat template are recognised."""

    num_rows: int
    digest: str
    template_digest: str = ""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], chat_template: str = "") -> Self:
        """The cursor of the rows, in their order, and of the template's text."""
        digest = hashlib.blake2b(digest_size=16)
        for row in rows:
            # A value that is not JSON counts by its type alone: its text may hold an address.
            text = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
            digest.update(text.encode() + b"\n")
        template = hashlib.blake2b(chat_template.encode(), digest_size=16)
        return cls(len(rows), digest.hexdigest(), template.hexdigest())

    def save(self, folder: Path, step: int) -> None:
        """Writes the cursor of a run whose last step is ``step`` into its folder or a checkpoint.

        Raises:
            StoreError: the folder cannot be written to.
        """
        cursor = {"next_step": step + 1, **asdict(self)}
        write_text(folder / layout.DATA_CURSOR, json.dumps(cursor, indent=2) + "\n")

    def check(self, folder: Path, *, has_weights: bool) -> None:
        """Refuses to resume a run on other rows or with another chat template, from a checkpoint
        (which ``has_weights``) or from its beginning.

        Raises:
            RunFolderError: with what to type.
            StoreError: the file is damaged.
        """
        path = folder / layout.DATA_CURSOR
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            num_rows, digest = saved["num_rows"], saved["digest"]
        except FileNotFoundError:
            # Written by a version that did not record the rows.
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(
                f"{layout.describe(path)} is damaged: {error!r}. Delete it if the rows of "
                "train_dataset are those that the run began with"
            ) from error
        shown = layout.describe(path)
        weights = layout.describe(folder)
        new_run = f" from its weights: model.path={weights}" if has_weights else ":"
        if saved.get("template_digest", self.template_digest) != self.template_digest:
            raise RunFolderError(
                f"the chat template is not the one that this run was trained with ({shown} knows "
                "the old one): the model's own was changed, or the file of model.chat_template. "
                f"Put it back, or begin a new run{new_run} trial_name=NAME"
            )
        if digest == self.digest:
            return
        change = (
            f"had {num_rows} rows and has {self.num_rows} now"
            if num_rows != self.num_rows
            else f"has {num_rows} rows as before, with other content or in another order"
        )
        raise RunFolderError(
            f"train_dataset {change}: it is no longer known which tasks were done ({shown} "
            f"knows the old rows). Put them back, or begin a new run{new_run} trial_name=NAME"
        )


def open_cursor(
    folder: RunFolder, rows: Sequence[Mapping[str, Any]], chat_template: str = ""
) -> DataCursor:
    """The cursor of ``rows``, with which the run in ``folder`` begins or resumes.

    As long as there is nothing to resume from, rows and template may be corrected.

    Raises:
        RunFolderError: the run began with other rows or another template.
        StoreError: the record of them is damaged, or cannot be written.
    """
    cursor = DataCursor.of(rows, chat_template)
    latest = folder.latest_checkpoint()
    if latest is not None:
        cursor.check(folder.fetch(latest[1]), has_weights=True)
    elif (first_step := find_first_rolled_step(folder, 1)) > 1 or read_unused(folder, first_step):
        folder.fetch(layout.DATA_CURSOR)
        cursor.check(folder.path, has_weights=False)
    cursor.save(folder.path, 0 if latest is None else latest[0])
    folder.push(layout.DATA_CURSOR)
    return cursor


def find_first_rolled_step(folder: RunFolder, first_step: int) -> int:
    """The first step from ``first_step`` on that has no stored trajectories to learn from.

    A batch that failed as a whole stopped the run and is rolled out again: its cause may be gone.
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
    """What an interrupted run had finished of the steps from ``first_step`` on, which are now
    rolled out.

    Nothing where the batch of ``first_step`` had failed as a whole: what was made ahead of it, by
    the same agent and reward, is made again too.
    """
    if first_step in folder.trajectory_steps():
        folder.discard_pending()
        return []
    return folder.read_pending()


def read_open_rounds(folder: RunFolder, config: RolloutConfig, first_step: int) -> OpenRounds:
    """Which tasks of earlier rounds steps from ``first_step`` on have to be made of.

    Raises:
        RunFolderError: the file that knows it is gone.
    """
    last_step = first_step - 1
    if not last_step or not config.max_staleness:
        return {}
    if last_step not in folder.trajectory_steps():
        raise RunFolderError(
            f"{folder.location}: the trajectories of step {last_step} are gone, and with them, "
            "which "
            f"tasks are still to be trained on. Put trajectories/step-{last_step:06d}.parquet "
            "back, or start a new run: trial_name=NAME model.path=CHECKPOINT"
        )
    return folder.read_open_rounds(last_step)


@dataclass(frozen=True, slots=True)
class CheckpointSaver:
    """Saves a learner into its run's folder, whole or not at all."""

    config: TrainConfig
    folder: RunFolder
    learner: Learner
    cursor: DataCursor

    def is_due(self, step: int) -> bool:
        """Every ``save_every_steps``, after the last step, and after the best evaluation yet."""
        every = self.config.save_every_steps
        if step == self.config.total_steps or (every is not None and step % every == 0):
            return True
        metric = self.config.keep_best_checkpoint
        if metric is None or step not in self.folder.eval_steps():
            return False
        # Later evaluations may be there from before an interruption, and that of step 0 is of no
        # checkpoint.
        best = find_best_eval(self.folder, metric, range(1, step + 1))
        return best is not None and best.step == step

    def save(self, step: int) -> None:
        """Writes the checkpoint of a step and deletes what is not to be kept.

        Raises:
            StoreError: the disk is full; earlier checkpoints are intact.
        """
        with self.folder.new_checkpoint(step) as path:
            self.learner.save(path)
            self.cursor.save(path, step)
        metric = self.config.keep_best_checkpoint
        best = find_best_checkpoint(self.folder, metric) if metric else None
        self.folder.prune_checkpoints(
            self.config.keep_last_checkpoints, keep=() if best is None else (best[0].step,)
        )
