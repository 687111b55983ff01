"""What crosses between the command and its trainer processes: a spec in their environment one
way, events on a socket, a line of JSON each, the other."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import TypeAdapter

from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.errors import AgentrlError, UserInputError, build_error
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.working_copy import FolderOwner
from agentrl_cli.train.rendezvous import Rendezvous

_log = get_logger(__name__)

#: The environment variable of the spec. It holds keys, and an agent (a child of the trainer, or
#: code inside it) has no business with them: it is removed as it is read.
_SPEC = "AGENTRL_TRAINER_SPEC"
#: As torchrun sets them. Removed too: an agent's own torch would take itself for a rank.
_RANK, _LOCAL_RANK, _WORLD_SIZE = "RANK", "LOCAL_RANK", "WORLD_SIZE"
#: How long an event other than progress waits for a reader that is busy.
_EVENT_SECONDS = 1.0
#: How long the last events may take.
_FLUSH_SECONDS = 5.0
_OBSERVER_EVENTS = ("on_stage", "on_progress", "on_step", "on_message")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServers:
    """A run as the command resolved it, and where its engine servers listen."""

    run: ResolvedRun
    endpoints: tuple[ServerEndpoint, ...] = ()
    """None with the embedded engine, which is in rank 0 itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """Where a trainer finds the cluster on which its run is placed."""

    address: str
    namespace: str
    """Of the run's actors; no other run has it."""
    start_seconds: float
    """How long to wait for room on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSpec:
    """What every trainer process of a run is started with, besides the run folder."""

    owner: FolderOwner
    """The command, which holds the run folder."""
    servers: RunningServers
    secrets: Sequence[Sequence[Any]]
    """What is masked in the run folder's configuration."""
    rendezvous: str
    """The address at which several ranks meet; see :class:`Rendezvous`."""
    cluster: ClusterAddress | None = None
    """None: everything is on this machine."""

    def environment(self, rank: int = 0, world_size: int = 1) -> dict[str, str]:
        """Additions to the environment of a trainer process."""
        return {
            _SPEC: TypeAdapter(TrainerSpec).dump_json(self).decode(),
            _RANK: str(rank),
            _LOCAL_RANK: str(rank),
            _WORLD_SIZE: str(world_size),
        }

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> tuple[Self, Rendezvous | None]:
        """From a trainer's environment, in which nothing of it is left: the spec, and which of
        several ranks the process is.

        Raises:
            UserInputError: it was not started by a command.
        """
        text = environment.pop(_SPEC, None)
        if text is None:
            raise UserInputError(
                "a trainer process is started by the command, which gives it servers and a run "
                "folder. Type agentrl train --config FILE"
            )
        spec = TypeAdapter(cls).validate_json(text)
        rank, count = int(environment.pop(_RANK)), int(environment.pop(_WORLD_SIZE))
        del environment[_LOCAL_RANK]
        if count == 1:
            return spec, None
        return spec, Rendezvous(index=rank, count=count, address=spec.rendezvous)


@dataclass(frozen=True, slots=True)
class TrainerReport:
    """The last event of a trainer, about itself; empty where it was killed."""

    is_complete: bool | None = None
    """Set when it ended well; False: it was asked to stop before the last step."""
    error: AgentrlError | None = None
    """What it failed with: an error raised on purpose, so that trying again does not help."""
    crash: str | None = None
    """What it crashed with: any other exception, and where."""


class TrainerEventWriter:
    """An :class:`~agentrl_cli.log.Observer` that writes every event to a socket.

    A reader that has stopped or gone does not hold the trainer up: while the socket is full,
    progress is dropped at once and other events after a second.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._is_broken = False

    def on_stage(self, stage: str, total: int | None = None) -> None:
        self._write(_EVENT_SECONDS, "on_stage", stage, total)

    def on_progress(self, num_done: int, note: str = "") -> None:
        self._write(0.0, "on_progress", num_done, note)

    def on_step(self, metrics: Mapping[str, float]) -> None:
        self._write(_EVENT_SECONDS, "on_step", {k: float(v) for k, v in metrics.items()})

    def on_message(self, text: str) -> None:
        self._write(_EVENT_SECONDS, "on_message", text)

    def report(self, report: TrainerReport) -> None:
        """Sends the last event."""
        error = report.error
        described = error and (type(error).__name__, str(error), error.exit_code)
        self._write(_FLUSH_SECONDS, "report", report.is_complete, described, report.crash)

    def _write(self, patience_seconds: float, *event: object) -> None:
        # It begins with a line break: the event before it may have been cut short.
        rest = f"\n{json.dumps(event)}\n".encode()
        deadline = time.monotonic() + patience_seconds
        with self._lock:
            while rest and not self._is_broken:
                try:
                    rest = rest[os.write(self._descriptor, rest) :]
                except BlockingIOError:
                    seconds = max(0.0, deadline - time.monotonic())
                    if not select.select([], [self._descriptor], [], seconds)[1]:
                        return
                except OSError as error:
                    _log.warning("the command no longer listens (%s)", error)
                    self._is_broken = True


class TrainerEventReader:
    """Forwards a trainer's events to an observer until the trainer's end of the socket closes.

    Args:
        descriptor: of this end, closed with the trainer's.
        observer: shows the run to a person.
    """

    def __init__(self, descriptor: int, observer: Observer) -> None:
        self._descriptor = descriptor
        self._observer = observer
        self.report = TrainerReport()
        self.num_steps = 0
        """Steps that the trainer has done."""
        self.is_stepping = False
        """True once it has begun a step: it has something to finish."""
        self._thread = threading.Thread(target=self._read, name="agentrl-trainer", daemon=True)
        self._thread.start()

    def finish(self, timeout_seconds: float = _FLUSH_SECONDS) -> TrainerReport:
        """The report of the trainer, which has ended; events on their way are forwarded first.

        Something that the trainer left behind may hold its end of the socket open: it is not
        waited for.
        """
        self._thread.join(timeout_seconds)
        return self.report

    def _read(self) -> None:
        with os.fdopen(self._descriptor, "rb") as pipe:
            for line in filter(bytes.strip, pipe):
                try:
                    self._apply(*json.loads(line))
                except Exception as error:
                    # A line cut short, or a terminal that has gone: the report must still arrive.
                    _log.warning("an event of the trainer was not shown (%r): %.200r", error, line)

    def _apply(self, event: str, *values: Any) -> None:
        if event == "report":
            is_complete, error, crash = values
            self.report = TrainerReport(is_complete, error and build_error(*error), crash)
            return
        if event not in _OBSERVER_EVENTS:
            raise ValueError(f"unknown event {event!r}")
        self.num_steps += event == "on_step"
        self.is_stepping |= event == "on_stage" and values[0] in ("rollout", "train")
        getattr(self._observer, event)(*values)
