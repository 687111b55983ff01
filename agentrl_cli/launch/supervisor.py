"""A run of several processes: servers and a trainer, started, watched and ended in order.

The servers outlive a trainer that was killed: it is started again and goes on from its last
checkpoint and the stored trajectories, as the command typed again would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError
from agentrl_cli.launch.child_trainer import ChildTrainer
from agentrl_cli.launch.events import TrainerReport
from agentrl_cli.launch.fleet import NoServers, StartingFleet
from agentrl_cli.launch.handover import RunningServers
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.train.stop_flag import StopFlag

_log = get_logger(__name__)

_POLL_SECONDS = 0.05
#: Room in the deadline of a step for what has none of its own: the update, and saving.
_UPDATE_SECONDS = 3600.0


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Runs a trainer over a fleet of servers until the run has ended."""

    config: ExperimentConfig
    servers: StartingFleet | NoServers
    start_trainer: Callable[[RunningServers | None], ChildTrainer]
    observer: Observer
    stop: StopFlag
    _num_restarts: int = field(default=0, init=False)
    _last_crash: str | None = field(default=None, init=False)

    def run(self) -> bool:
        """True when the last step is done, False when the run was asked to stop before it.

        Raises:
            AgentrlError: what the trainer or the servers failed with.
        """
        while True:
            trainer = self.start_trainer(self.servers.servers)
            try:
                self._watch(trainer)
            finally:
                report = trainer.end()
            if self._is_over(trainer, report):
                return bool(report.is_complete)

    def _watch(self, trainer: ChildTrainer) -> None:
        """Returns when the trainer has ended, or has nothing to finish and was asked to."""
        give_up_at: float | None = None
        while not trainer.has_ended():
            self.servers.check()
            if self.stop.is_set():
                if not trainer.is_stepping:
                    return
                if give_up_at is None:
                    trainer.ask_to_finish()
                    give_up_at = time.monotonic() + self._compute_step_deadline()
                elif time.monotonic() > give_up_at:
                    raise RunError(
                        "the trainer was asked to finish its step and did not in "
                        f"{self._compute_step_deadline():.0f} s. What was saved before stays; the "
                        f"same command goes on from there.{trainer.tail()}"
                    )
            time.sleep(_POLL_SECONDS)

    def _is_over(self, trainer: ChildTrainer, report: TrainerReport) -> bool:
        """False: the trainer shall be started again.

        Raises:
            AgentrlError: the run has failed.
        """
        if report.error is not None:
            raise report.error
        if report.is_complete is not None or self.stop.is_set():
            return True
        cause = f"crashed: {report.crash}" if report.crash else trainer.describe_end()
        limit = self.config.launcher.max_trainer_restarts
        if report.crash and report.crash == self._last_crash and trainer.num_steps == 0:
            raise RunError(
                f"the trainer {cause}, twice at the same place and without a step in between, so "
                "it is not started again. This is a bug in agentrl, or in code it called. The "
                f"full traceback is in {trainer.log_path}{trainer.tail()}"
            )
        if self._num_restarts >= limit:
            raise RunError(
                f"the trainer {cause}, and launcher.max_trainer_restarts is {limit}. Its last "
                "checkpoint and the trajectories of every finished batch are stored: the same "
                "command goes on from there. (SIGKILL is often the system's answer to too little "
                f"memory: a smaller train.micro_batch_tokens needs less.){trainer.tail()}"
            )
        self._num_restarts += 1
        self._last_crash = report.crash
        text = f"the trainer {cause}; it is started again (restart {self._num_restarts} of {limit})"
        _log.warning("%s", text)
        self.observer.on_message(text)
        return False

    def _compute_step_deadline(self) -> float:
        """Seconds after which a step is over, with its publication and an evaluation."""
        rollout, engine = self.config.rollout, self.config.engine
        num_trajectories = self.config.train_dataset.batch_size * self.config.gconfig.n_samples
        return (
            rollout.compute_deadline(num_trajectories * (rollout.max_staleness + 1))
            + engine.compute_publish_deadline()
            + _UPDATE_SECONDS
        )
