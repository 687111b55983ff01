"""The training loop: collect trajectories, learn from them, publish, record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.errors import AlarmError, RolloutFailedError
from agentrl_cli.log import Observer
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.scheduler import RolloutScheduler
from agentrl_cli.store import layout
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.trajectory_record import format_record, parse_record
from agentrl_cli.train.learner import Learner
from agentrl_cli.train.monitor.alarms import Alarms
from agentrl_cli.train.monitor.batch_metrics import describe_hardness, summarize_trajectories
from agentrl_cli.train.monitor.loggers.background_logger import BackgroundLogger
from agentrl_cli.train.monitor.run_trace import RunTrace
from agentrl_cli.train.monitor.step_clock import StepClock
from agentrl_cli.train.publish import publish_and_verify
from agentrl_cli.train.ranks import Ranks
from agentrl_cli.train.resume import CheckpointSaver


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """One run from its first step, or from where it was interrupted, to its last.

    Every rank runs it, and calls the learner's methods in the same order. Rank 0 alone has a
    ``coordinator`` with everything else; the others hear from it what comes next.
    """

    config: ExperimentConfig
    learner: Learner
    ranks: Ranks
    coordinator: RunCoordinator | None

    def run(self) -> bool:
        """Trains until the last step or a request to stop; True when the last step is done.

        Raises:
            AlarmError: an alarm ends the run; the step is saved.
        """
        main, first_step = self.coordinator, self.learner.step + 1
        if main is not None:
            main.begin(first_step)
        with self.learner.visibly_changed():
            self._publish(first_step - 1)
        self._publish(first_step - 1)
        if main is not None:
            main.evaluate_if_due(first_step - 1)
        for step in range(first_step, self.config.train.total_steps + 1):
            batch = self._broadcast_batch(None if main is None else main.collect(step))
            if batch is None:
                return False
            metrics = self._learn(step, batch) | self._publish(step)
            is_saved = None if main is None else main.finish_step(step, batch, metrics)
            if self.ranks.broadcast(is_saved):
                if main is None:
                    self.learner.save(Path())
                else:
                    main.save(step)
            if main is not None:
                main.stop_if_alarmed(step)
        return True

    def _broadcast_batch(self, batch: list[Trajectory] | None) -> list[Trajectory] | None:
        """The batch of rank 0 on every rank; None: the run was asked to stop."""
        if self.ranks.count == 1:
            return batch
        content = self.ranks.broadcast_bytes(b"\n".join(map(format_record, batch or ())))
        return [parse_record(line) for line in content.splitlines()] or None

    def _learn(self, step: int, batch: Sequence[Trajectory]) -> dict[str, float]:
        """Updates the learner; an engine on the same GPU makes room for it meanwhile."""
        with nullcontext() if self.coordinator is None else self.coordinator.released_engine():
            return self.learner.update(batch, policy_version=step - 1)

    def _publish(self, version: int) -> dict[str, float]:
        """Gives the engine the learner's weights, verified, and lets rollouts use them."""
        # Rank 0 may have servers to wait for.
        self.ranks.broadcast(None)
        if self.coordinator is not None:
            return self.coordinator.publish(version)
        self.learner.weights()
        self.learner.score_probes([], [])
        return {}


@dataclass(slots=True, kw_only=True)
class RunCoordinator:
    """What rank 0 does in a run besides training: it collects, publishes, records, evaluates.

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
    first_rolled_step: int
    """Trajectories of earlier steps are stored from before an interruption."""
    background: BackgroundLoop
    probes: Sequence[Sequence[int]]
    """Prompts on which the engine's weights are verified."""
    evaluate: Callable[[int], Mapping[str, float]]
    """Evaluates the published policy after a step and stores the report; gives its metrics."""
    observer: Observer
    loggers: Sequence[BackgroundLogger]
    stop: StopFlag
    _clock: StepClock = field(default_factory=StepClock, init=False)
    _trace: RunTrace = field(default_factory=RunTrace, init=False)
    _train_started_at: float = field(default=0.0, init=False)
    _is_saved: bool = field(default=True, init=False)
    _alarms: Alarms = field(init=False)

    def begin(self, first_step: int) -> None:
        """Makes the run folder that of a run whose next step is ``first_step``."""
        self.folder.truncate_metrics(first_step - 1)
        lines = self.folder.read_metrics()
        self._alarms = Alarms(self.config, self.folder.location, self.observer, lines)
        if self.config.train.trace:
            self._trace = RunTrace(self.folder.path / layout.TRACE)
        self._clock = StepClock(self._trace.add_phase)

    def collect(self, step: int) -> list[Trajectory] | None:
        """The trajectories of a step, on disk: made now, or before an interruption; None when the
        run was asked to stop."""
        # A stop that comes after it was decided not to save the last step waits for the next.
        if self.stop.is_set() and self._is_saved:
            return None
        self._clock.begin_step()
        if step < self.first_rolled_step:
            self.observer.on_message(f"step {step}: its stored trajectories are used again")
            with self._clock.phase("store"):
                return self.folder.read_trajectories(step)
        num_trajectories = self.config.train_dataset.batch_size * self.config.gconfig.n_samples
        self.observer.on_stage("rollout", num_trajectories)
        try:
            with self._clock.phase("rollout"):
                batch = self.background.run(
                    self.scheduler.next_batch(step), self.compute_deadline()
                )
        except RolloutFailedError as error:
            self.folder.write_trajectories(step, error.trajectories)
            raise
        with self._clock.phase("store"):
            self.folder.write_trajectories(step, batch, self.scheduler.planner.open_rounds)
        return batch

    def compute_deadline(self) -> float:
        """Seconds after which the next batch is there, those that are made ahead of it too."""
        config, num_backup_tasks = self.config, self.config.resolve_max_backup_tasks()
        num_groups = config.train_dataset.batch_size + num_backup_tasks
        num_steps_ahead = config.rollout.max_staleness + 1
        # At worst every backup task replaces the one before it.
        return config.rollout.compute_deadline(
            num_groups * config.gconfig.n_samples * num_steps_ahead,
            max_in_a_row=1 + num_backup_tasks,
        )

    @contextmanager
    def released_engine(self) -> Iterator[None]:
        """A block in which an engine on the trainer's GPU leaves it its memory."""
        self.observer.on_stage("train")
        deadline = self.config.engine.compute_release_deadline()
        with self._clock.phase("engine_memory"):
            self.background.run(self.engine.release_memory(), deadline)
        self._train_started_at = time.time()
        with self._clock.phase("train"):
            yield
        with self._clock.phase("engine_memory"):
            self.background.run(self.engine.reclaim_memory(), deadline)

    def publish(self, version: int) -> dict[str, float]:
        """Gives the engine the learner's weights, verified, and lets rollouts use them."""
        self.observer.on_stage("publish")
        started_at = time.time()
        metrics = self.background.run(
            publish_and_verify(
                self.engine,
                self.learner,
                version,
                self.probes,
                self.config.train.probe_tolerance,
                on_served=lambda: self.scheduler.set_policy_version(version),
            ),
            self.config.engine.compute_publish_deadline(),
        )
        self._trace.add_publication(version, started_at, metrics)
        return metrics

    def finish_step(
        self, step: int, batch: Sequence[Trajectory], metrics: Mapping[str, float]
    ) -> bool:
        """Records the step and evaluates when it is due; True when it is to be saved."""
        self._is_saved = False
        self.record(step, batch, metrics)
        if self._find_alarm(step) is not None:
            return True
        self.evaluate_if_due(step)
        return self.stop.is_set() or self.saver.is_due(step)

    def record(self, step: int, batch: Sequence[Trajectory], metrics: Mapping[str, float]) -> None:
        """Writes the step's line of metrics and shows it."""
        times, engine = self._clock.end_step(), self.engine
        num_tokens = sum(t.num_completion_tokens for t in batch)
        line = {
            "step": float(step),
            **summarize_trajectories(batch),
            "concurrency_limit": float(self.scheduler.pool.limit.value),
            "num_retries": float(self.scheduler.pool.take_num_retries()),
            "num_tasks_set_aside": float(self.scheduler.planner.num_set_aside),
            "num_tasks_in_cooldown": float(self.scheduler.planner.count_cooling(step)),
            **metrics,
            **times,
            **(engine.take_fault_metrics() if isinstance(engine, EngineRouter) else {}),
            "tokens_per_second": num_tokens / times["step_seconds"],
            "train_tokens_per_second": metrics["train_tokens"] / metrics["train_seconds"],
            "memory_mb": psutil.Process().memory_info().rss / 1e6,
            "policy_version": float(step),
        }
        line |= self._alarms.check(line)
        with self._clock.phase("store"):
            self.folder.write_proximal_logprobs(step, self.learner.proximal_logprobs)
            self.folder.append_metrics(line)
        self._log(step, line)
        for logger in self.loggers:
            logger.log_trajectories(step, batch)
        self._trace.add_update(self._train_started_at, metrics)
        self._trace.add_trajectories(step, batch)
        self._trace.flush()
        self.observer.on_step(line)
        if step == 1 and (advice := describe_hardness(line)) is not None:
            self.observer.on_message(advice)
        self._alarms.report()

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(step, metrics)

    def stop_if_alarmed(self, step: int) -> None:
        """Raises the alarm that ends the run, if there is one."""
        error = self._find_alarm(step)
        if error is not None:
            raise error

    def _find_alarm(self, step: int) -> AlarmError | None:
        """After the last step nothing is left to stop."""
        return self._alarms.find_stop() if step < self.config.train.total_steps else None

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates before the first step, after the last, and every ``eval_every_steps``."""
        every, last_step = self.config.train.eval_every_steps, self.config.train.total_steps
        due = step in (0, last_step) or (every is not None and step % every == 0)
        if due and self.config.valid_dataset is not None and step not in self.folder.eval_steps():
            with self._clock.phase("evaluation"):
                metrics = self.evaluate(step)
            self._log(step, metrics)
            if self.config.train.trace:
                trajectories, _ = self.folder.read_eval(step)
                self._trace.add_trajectories(step, trajectories)
            self._trace.flush()

    def save(self, step: int) -> None:
        """Writes a checkpoint, and deletes those that are not kept."""
        self.observer.on_stage("save")
        with self._clock.phase("save"):
            self.saver.save(step)
        self._trace.flush()
        self._is_saved = True


class StopFlag(Protocol):
    """Whether the run has been asked to end after the step in progress."""

    def is_set(self) -> bool:
        """True once it has."""
        ...
