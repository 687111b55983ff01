"""One life of a trainer process, as the command that started it sees it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl_cli.launch.events import EventReader, TrainerReport
from agentrl_cli.launch.handover import RunningServers, TrainerOrders
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.process import ManagedProcess, describe_status
from agentrl_cli.log import Observer
from agentrl_cli.train.rank_place import RankPlace

#: How long a trainer may take to end after its last word.
_EXIT_SECONDS = 30.0
_KILL_SECONDS = 15.0


class ChildTrainer:
    """A trainer process with a pipe for its events. Started when made; ends with :meth:`end`.

    Args:
        planned: the trainer's command line up to the run folder, which this process holds, and
            additions to the environment.
        log_path: gets what the trainer and the agents in it print.
        servers: the engine servers; None: the trainer itself samples.
        secrets: what is masked in the run folder's configuration.
        observer: is told what the trainer tells.
        place: among several trainers, of which this is the first; None: it trains alone.

    Raises:
        EngineError: the operating system starts no more processes.
    """

    def __init__(
        self,
        planned: PlannedProcess,
        log_path: Path,
        servers: RunningServers | None,
        *,
        secrets: Sequence[Sequence[Any]],
        observer: Observer,
        place: RankPlace | None = None,
    ) -> None:
        reading, writing = os.pipe()
        orders = TrainerOrders(
            owner_pid=os.getpid(),
            events_descriptor=writing,
            servers=servers,
            secrets=secrets,
            place=place,
        )
        self.log_path = log_path
        self._process = ManagedProcess(
            "trainer",
            (*planned.argv, *orders.arguments()),
            {**planned.env, **orders.environment()},
            log_path,
            pass_fds=(writing,),
        )
        try:
            self._process.start()
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._events = EventReader(reading, observer)
        self._reported_at: float | None = None

    @property
    def is_stepping(self) -> bool:
        """True once it is in the middle of a step, so that it has something to finish."""
        return self._events.is_stepping

    @property
    def num_steps(self) -> int:
        """Steps done by this life."""
        return self._events.num_steps

    def has_ended(self) -> bool:
        """True when it has ended, or has said its last word and does not end."""
        if self._process.poll() is not None:
            return True
        if self._events.report == TrainerReport():
            return False
        self._reported_at = self._reported_at or time.monotonic()
        return time.monotonic() > self._reported_at + _EXIT_SECONDS

    def ask_to_finish(self) -> None:
        """Asks it to finish the step in progress, save, and end."""
        self._process.terminate()

    def end(self) -> TrainerReport:
        """Kills it if it still runs, and all that it started; what it said last."""
        self._process.kill()
        self._process.wait(_KILL_SECONDS)
        return self._events.finish()

    def describe_end(self) -> str:
        """How it ended, for a person: ``was killed by SIGKILL``."""
        status = self._process.poll()
        if status is None:
            return "cannot be killed"
        is_own = " and without a word" if status <= 128 else ""
        return describe_status(status) + is_own

    def tail(self) -> str:
        """The last lines of its log, introduced; empty where there are none."""
        return self._process.quote_log()
