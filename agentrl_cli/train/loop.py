"""The training loop: collect trajectories, learn from them, publish, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import RolloutFailedError
from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.rollout.scheduler import RolloutScheduler
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.train.alarms import Alarms
from agentrl_cli.train.engine_faults import EngineFaults
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.loggers import MetricsLogger
from agentrl_cli.train.metrics import summarize_trajectories
from agentrl_cli.train.progress import BatchProgress
from agentrl_cli.train.publish import publish_and_verify, resolve_probe_tolerance
from agentrl_cli.train.saving import CheckpointSaver
from agentrl_cli.train.stop_flag import StopFlag


@dataclass(slots=True, kw_only=True)
class TrainingLoop:
    """One run from its first step, or from where it was interrupted, to its last.

    The trajectories of a step are on disk before the step learns from them, and a step is
    a function of the weights before it and of its trajectories. So whatever a killed run
    had rolled out after its last checkpoint is read back and learned from again, and
    nothing is sampled twice or lost.
    """

    config: ExperimentConfig
    folder: RunFolder
    learner: Learner
    saver: CheckpointSaver
    engine: InferenceEngine
    scheduler: RolloutScheduler
    progress: BatchProgress
    first_rolled_step: int
    """Trajectories of earlier steps are stored from before an interruption."""
    background: BackgroundLoop
    probes: Sequence[Sequence[int]]
    """Prompts on which the engine's weights are verified."""
    evaluate: Callable[[int], None]
    """Evaluates the published policy after a step and stores the report."""
    observer: Observer
    loggers: Sequence[MetricsLogger]
    stop: StopFlag
    _step_started: float = field(default=0.0, init=False)
    _faults: EngineFaults = field(init=False)
    _alarms: Alarms = field(init=False)

    def __post_init__(self) -> None:
        self._faults = EngineFaults(self.engine)

    def run(self) -> bool:
        """Trains until the last step or a request to stop; True when the last step is done.

        Raises:
            AlarmError: an alarm rang that ends the run; the step is saved.
        """
        last_step = self.config.train.total_steps
        first_step = self.learner.step + 1
        self.folder.truncate_metrics(first_step - 1)
        self.folder.discard_micro_batches(first_step - 1)
        lines = self.folder.read_metrics()
        self._alarms = Alarms(self.config, self.folder.path, self.observer, lines)
        self.publish(first_step - 1)
        self.evaluate_if_due(first_step - 1)
        for step in range(first_step, last_step + 1):
            if self.stop.is_set():
                return False
            self._step_started = time.perf_counter()
            batch = self.collect(step)
            collected = time.perf_counter()
            metrics = self.learn(step, batch)
            metrics |= self.publish(step)
            metrics |= {"rollout_seconds": collected - self._step_started}
            self.record(step, batch, metrics)
            self.stop_if_alarmed(step)
            self.evaluate_if_due(step)
            self.save_if_due(step)
        return True

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of a step, on disk: made now, or before an interruption."""
        if step < self.first_rolled_step:
            self.observer.on_message(f"step {step}: its stored trajectories are used again")
            return self.folder.read_trajectories(step)
        num_trajectories = self.config.train_dataset.batch_size * self.config.gconfig.n_samples
        self.observer.on_stage("rollout", num_trajectories)
        self.progress.begin(step)
        try:
            batch = self.background.run(self.scheduler.next_batch(step), self.compute_deadline())
        except RolloutFailedError as error:
            self.folder.write_trajectories(step, error.trajectories)
            raise
        self.folder.write_trajectories(step, batch)
        return batch

    def compute_deadline(self) -> float:
        """Seconds after which the next batch is there, those that are made ahead of it too."""
        config, num_spares = self.config, self.config.resolve_max_replaced_groups()
        num_groups = config.train_dataset.batch_size + num_spares
        num_steps_ahead = config.rollout.max_staleness + 1
        # At worst every spare replaces the one before it.
        return config.rollout.compute_deadline(
            num_groups * config.gconfig.n_samples * num_steps_ahead, max_in_a_row=1 + num_spares
        )

    def learn(self, step: int, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Updates the learner; an engine on the same GPU makes room for it meanwhile."""
        self.observer.on_stage("train")
        engine = self.config.engine
        self.background.run(self.engine.release_memory(), engine.compute_release_deadline())
        metrics = self.learner.update(
            batch, policy_version=step - 1, save_fault=self.folder.write_micro_batch
        )
        self.background.run(self.engine.reclaim_memory(), engine.compute_release_deadline())
        return metrics

    def publish(self, version: int) -> dict[str, float]:
        """Gives the engine the learner's weights, verified, and lets rollouts use them."""
        self.observer.on_stage("publish")
        metrics = self.background.run(
            publish_and_verify(
                self.engine,
                self.learner,
                version,
                self.probes,
                resolve_probe_tolerance(self.config),
            ),
            self.config.engine.compute_publish_deadline(),
        )
        self.scheduler.set_policy_version(version)
        return metrics

    def record(self, step: int, batch: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        """Writes the step's line of metrics and shows it."""
        seconds = time.perf_counter() - self._step_started
        num_tokens = sum(t.num_completion_tokens for t in batch)
        line = {
            "step": float(step),
            **summarize_trajectories(batch, policy_version=step - 1),
            "num_resting_tasks": float(self.scheduler.count_resting(step)),
            **metrics,
            **self._faults.take(),
            "reward_seconds": sum(t.reward_seconds for t in batch),
            "tokens_per_second": num_tokens / seconds,
            "train_tokens_per_second": metrics["train_tokens"] / metrics["train_seconds"],
            "step_seconds": seconds,
            "policy_version": float(step),
        }
        line |= self._alarms.check(line)
        self.folder.append_metrics(line)
        for logger in self.loggers:
            logger.log(step, line)
        self.observer.on_step(line)
        self._alarms.tell()

    def stop_if_alarmed(self, step: int) -> None:
        """Saves and raises where an alarm ends the run; after the last step nothing is left to."""
        error = self._alarms.find_stop()
        if error is not None and step < self.config.train.total_steps:
            self.save(step)
            raise error

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates before the first step, after the last, and every ``eval_every_steps``."""
        every, last_step = self.config.train.eval_every_steps, self.config.train.total_steps
        due = step in (0, last_step) or (every is not None and step % every == 0)
        if due and self.config.valid_dataset is not None and step not in self.folder.eval_steps():
            self.evaluate(step)

    def save_if_due(self, step: int) -> None:
        """Saves when it is due, and when asked to stop."""
        if self.stop.is_set() or self.saver.is_due(step):
            self.save(step)

    def save(self, step: int) -> None:
        """Writes a checkpoint, and deletes those that are not kept."""
        self.observer.on_stage("save")
        self.saver.save(step)
