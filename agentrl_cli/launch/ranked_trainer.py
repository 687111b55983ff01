"""One life of several trainer processes that train together."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_cli.launch.child_trainer import ChildTrainer
from agentrl_cli.launch.events import TrainerReport
from agentrl_cli.launch.handover import RunningServers, TrainerOrders
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.process import ManagedProcess, describe_status
from agentrl_cli.log import Observer
from agentrl_cli.train.rank_place import RankLostError, RankPlace

#: What the first rank may take to say what it knows of another's end, before it is ended too.
_NOTICE_SECONDS = 5.0
_KILL_SECONDS = 15.0
_SIGKILLED = 128 + signal.SIGKILL


class RankedTrainer(ChildTrainer):
    """The first rank as a :class:`ChildTrainer`, and the others beside it.

    They live and die together: the end of any of them is the end of all, for the others would
    wait for it.

    Args:
        planned: the command line of each, the first rank's first.
        log_dir: gets a log for each.
        servers: as for one trainer, also the two below.
        secrets: as there.
        observer: as there.

    Raises:
        EngineError: the operating system starts no more processes.
    """

    def __init__(
        self,
        planned: Sequence[PlannedProcess],
        log_dir: Path,
        servers: RunningServers | None,
        *,
        secrets: Sequence[Sequence[Any]],
        observer: Observer,
    ) -> None:
        self._meeting_dir = Path(tempfile.mkdtemp(prefix="agentrl-ranks-"))
        self._followers: list[ManagedProcess] = []
        self._lost: list[ManagedProcess] = []
        self._lost_at: float | None = None
        places = [
            RankPlace(index=i, count=len(planned), meeting_path=str(self._meeting_dir / "meeting"))
            for i in range(len(planned))
        ]
        try:
            for process, place in zip(planned[1:], places[1:], strict=True):
                self._followers.append(_start(process, place, log_dir, servers, secrets))
            super().__init__(
                planned[0],
                log_dir / f"{planned[0].name}.log",
                servers,
                secrets=secrets,
                observer=observer,
                place=places[0],
            )
        except BaseException:
            self._end_followers()
            raise

    def has_ended(self) -> bool:
        """True when any rank has ended that should not have, or the first has."""
        has_first_ended = super().has_ended()
        if not has_first_ended and self._events.report == TrainerReport():
            self._note_lost()
        if self._lost and self._lost_at is None:
            self._lost_at = time.monotonic()
        is_waiting_over = self._lost_at is not None and (
            time.monotonic() > self._lost_at + _NOTICE_SECONDS
        )
        return has_first_ended or is_waiting_over

    def end(self) -> TrainerReport:
        """Kills all that still run; what the first rank said last.

        That it crashed says nothing where another ended before it: its exchange with that one
        failed.
        """
        is_first_killed = self._process.poll() == _SIGKILLED
        ended_sooner = list(self._lost)
        self._note_lost()
        killed = [process for process in self._lost if process.poll() == _SIGKILLED]
        try:
            report = super().end()
        finally:
            self._end_followers()
        speaks_of_others = (report.crash or "").startswith(RankLostError.__name__)
        if is_first_killed or not (ended_sooner or killed or speaks_of_others):
            # They ended because the first did.
            self._lost.clear()
        # Exchanges with who was killed failed for it, and that may have been seen sooner.
        self._lost.sort(key=lambda process: process not in killed)
        return replace(report, crash=None) if self._lost else report

    def describe_end(self) -> str:
        """How the rank ended that ended first."""
        if not self._lost:
            return super().describe_end()
        process = self._lost[0]
        how = describe_status(process.poll() or 0)
        num_ranks = 1 + len(self._followers)
        return f"{how} in rank {self._followers.index(process) + 1} of {num_ranks} ({process.name})"

    def tail(self) -> str:
        """The last lines of the log of the rank that ended first."""
        return self._lost[0].quote_log() if self._lost else super().tail()

    def _note_lost(self) -> None:
        """Takes down who has ended without being told to."""
        for process in self._followers:
            if process.poll() not in (None, 0) and process not in self._lost:
                self._lost.append(process)

    def _end_followers(self) -> None:
        for process in self._followers:
            process.kill()
        for process in self._followers:
            process.wait(_KILL_SECONDS)
        shutil.rmtree(self._meeting_dir, ignore_errors=True)


def _start(
    planned: PlannedProcess,
    place: RankPlace,
    log_dir: Path,
    servers: RunningServers | None,
    secrets: Sequence[Sequence[Any]],
) -> ManagedProcess:
    orders = TrainerOrders(
        owner_pid=0, events_descriptor=-1, servers=servers, secrets=secrets, place=place
    )
    process = ManagedProcess(
        planned.name,
        (*planned.argv, *orders.arguments()),
        {**planned.env, **orders.environment()},
        log_dir / f"{planned.name}.log",
    )
    process.start()
    return process
