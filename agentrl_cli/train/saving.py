"""When a checkpoint is saved, what is written into it, and which are kept."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_cli.config.experiment import TrainConfig
from agentrl_cli.store.best import find_best_checkpoint, find_best_eval
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.data_cursor import DataCursor
from agentrl_cli.train.learner import Learner


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
