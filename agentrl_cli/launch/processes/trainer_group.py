"""The trainer processes of a run, as the command sees them: started, watched, restarted, ended.

Engine servers outlive a trainer that was killed: it is started again and resumes from its last
checkpoint and the stored trajectories, as the command typed again would.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.server_http import format_log_tail
from agentrl_cli.errors import RunError
from agentrl_cli.launch.placement import Placement
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.managed_process import LOST_STATUS, Process
from agentrl_cli.launch.processes.trainer_protocol import (
    RunningServers,
    TrainerEventReader,
    TrainerReport,
    TrainerSpec,
)
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.working_copy import FolderOwner
from agentrl_cli.train.rendezvous import RankLostError

if TYPE_CHECKING:
    from agentrl_cli.train.loop import StopFlag

_log = get_logger(__name__)

_POLL_SECONDS = 0.05
#: Room in the deadline of a step for what has none of its own: the update, and saving.
_UPDATE_SECONDS = 3600.0
#: How long rank 0 may take to end after its last report.
_EXIT_SECONDS = 30.0
#: What rank 0 may take to report what it knows of another's end, before it is ended too.
_NOTICE_SECONDS = 5.0
_KILL_SECONDS = 15.0
#: From outside: what the others report then are consequences.
_KILLED = (128 + signal.SIGKILL, LOST_STATUS)


class TrainerGroup:
    """Trainer processes (ranks) that train together; rank 0 reports its events.

    Started when made; ended by :meth:`end`. They live and die together: the end of any of them is
    the end of all, for the others would wait for it.

    Args:
        planned: rank 0's first.
        log_dir: gets a log for each, with what it and, in rank 0, the agents print.
        servers: the engine servers; those of the embedded engine are none.
        owner: how they show that they work for this process in the run folder.
        secrets: what is masked in the run folder's configuration.
        observer: receives what rank 0 reports.
        placement: starts them.

    Raises:
        EngineError: the operating system starts no more processes.
    """

    def __init__(
        self,
        planned: Sequence[PlannedProcess],
        log_dir: Path,
        servers: RunningServers,
        *,
        owner: Callable[[], FolderOwner],
        secrets: Sequence[Sequence[Any]],
        observer: Observer,
        placement: Placement,
    ) -> None:
        self._stack = ExitStack()
        self._ranks: list[Process] = []
        self._lost: list[int] = []
        self._ending_since: float | None = None
        try:
            spec = TrainerSpec(
                owner=owner(),
                servers=servers,
                secrets=secrets,
                rendezvous=placement.make_rendezvous(self._stack),
                cluster=placement.cluster,
            )
            for rank, process in enumerate(planned):
                env = {**process.env, **spec.environment(rank, len(planned))}
                log_path = log_dir / f"{process.name}.log"
                started, events = placement.start_process(replace(process, env=env), log_path)
                self._ranks.append(started)
                if rank == 0:
                    self.events = TrainerEventReader(events.detach(), observer)
                else:
                    # It has nothing to report.
                    self._stack.callback(events.close)
        except BaseException:
            self._kill()
            raise

    def has_ended(self) -> bool:
        """True when rank 0 has ended, or another that should not have; or when rank 0 has reported
        its end and does not end."""
        if self._ranks[0].poll() is not None:
            return True
        patience_seconds = _EXIT_SECONDS
        if self.events.report == TrainerReport():
            self._note_lost()
            if not self._lost:
                return False
            patience_seconds = _NOTICE_SECONDS
        self._ending_since = self._ending_since or time.monotonic()
        return time.monotonic() > self._ending_since + patience_seconds

    def ask_to_finish(self) -> None:
        """Asks them to finish the step in progress, save, and end."""
        self._ranks[0].terminate()

    def end(self) -> TrainerReport:
        """Kills those that still run, and all that they started; what rank 0 reported last.

        That rank 0 crashed says nothing where another ended before it: its exchange with that one
        failed.
        """
        is_first_killed = self._ranks[0].poll() in _KILLED
        has_lost_sooner = bool(self._lost)
        self._note_lost()
        if self._ranks[0].poll() is not None and _blames_others(self.events.finish()):
            # The exchange with a process fails before the process has ended.
            deadline = time.monotonic() + _NOTICE_SECONDS
            while not self._lost and time.monotonic() < deadline:
                time.sleep(0.02)
                self._note_lost()
        killed = [rank for rank in self._lost if self._ranks[rank].poll() in _KILLED]
        self._kill()
        report = self.events.finish()
        if is_first_killed or not (has_lost_sooner or killed or _blames_others(report)):
            # They ended because rank 0 did.
            self._lost.clear()
        # Exchanges with a killed rank failed for the others, which may have been seen sooner.
        self._lost.sort(key=lambda rank: rank not in killed)
        return replace(report, crash=None) if self._lost else report

    def describe_end(self) -> str:
        """How the rank ended that ended first, for a person: ``was killed by SIGKILL``."""
        rank = self._lost[0] if self._lost else 0
        process = self._ranks[rank]
        status = process.poll()
        if rank > 0:
            place = f" in rank {rank} of {len(self._ranks)} ({process.name})"
        else:
            place = " and without a word" if status is not None and status <= 128 else ""
        return process.describe_end() + place

    def quote_log(self) -> str:
        """The last lines of the log of the rank that ended first, introduced."""
        process = self._ranks[self._lost[0] if self._lost else 0]
        return format_log_tail(process.log_path)

    def _note_lost(self) -> None:
        """Notes which of the others have failed."""
        for rank, process in enumerate(self._ranks):
            if rank > 0 and rank not in self._lost and process.poll() not in (None, 0):
                self._lost.append(rank)

    def _kill(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.stop(term_seconds=0, kill_seconds=_KILL_SECONDS)
        self._stack.close()


def _blames_others(report: TrainerReport) -> bool:
    return (report.crash or "").startswith(RankLostError.__name__)


@dataclass(slots=True, kw_only=True)
class TrainerSupervisor:
    """Runs a trainer until the run has ended, beside servers that ``check_servers`` looks after."""

    config: ExperimentConfig
    start_trainer: Callable[[], TrainerGroup]
    check_servers: Callable[[], None]
    """Raises AgentrlError once they cannot be kept running."""
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
            trainer = self.start_trainer()
            try:
                self._watch(trainer)
            finally:
                report = trainer.end()
            if report.error is not None:
                raise report.error
            if report.is_complete is not None or self.stop.is_set():
                return bool(report.is_complete)
            self._spend_restart(trainer, report.crash)

    def _watch(self, trainer: TrainerGroup) -> None:
        """Returns when the trainer has ended, or has nothing to finish and was asked to."""
        give_up_at: float | None = None
        while not trainer.has_ended():
            self.check_servers()
            if self.stop.is_set():
                if not trainer.events.is_stepping:
                    return
                if give_up_at is None:
                    trainer.ask_to_finish()
                    give_up_at = time.monotonic() + self._compute_step_deadline()
                elif time.monotonic() > give_up_at:
                    raise RunError(
                        "the trainer was asked to finish its step and did not in "
                        f"{self._compute_step_deadline():.0f} s. What was saved before stays; the "
                        f"same command resumes from there.{trainer.quote_log()}"
                    )
            time.sleep(_POLL_SECONDS)

    def _spend_restart(self, trainer: TrainerGroup, crash: str | None) -> None:
        """Says that it is started again.

        Raises:
            RunError: it is not, as that would not help, or has not helped so often.
        """
        cause = f"crashed: {crash}" if crash else trainer.describe_end()
        limit = self.config.launcher.max_trainer_restarts
        if crash and crash == self._last_crash and trainer.events.num_steps == 0:
            raise RunError(
                f"the trainer {cause}, twice at the same place without a step in between, so "
                "it is not started again. This is a bug in agentrl, or in code it called."
                f"{trainer.quote_log()}"
            )
        if self._num_restarts >= limit:
            raise RunError(
                f"the trainer {cause}, and launcher.max_trainer_restarts is {limit}. Its last "
                "checkpoint and the trajectories of every finished batch are stored: the same "
                "command resumes from there. (SIGKILL is often the system's answer to too little "
                f"memory: a smaller train.micro_batch_tokens needs less.){trainer.quote_log()}"
            )
        self._num_restarts += 1
        self._last_crash = crash
        text = f"the trainer {cause}; it is started again (restart {self._num_restarts} of {limit})"
        _log.warning("%s", text)
        self.observer.on_message(text)

    def _compute_step_deadline(self) -> float:
        """Seconds after which a step is over, with its publication and an evaluation."""
        rollout, engine = self.config.rollout, self.config.engine
        num_trajectories = self.config.train_dataset.batch_size * self.config.gconfig.n_samples
        return (
            rollout.compute_deadline(num_trajectories * (rollout.max_staleness + 1))
            + engine.compute_publish_deadline()
            + _UPDATE_SECONDS
        )
