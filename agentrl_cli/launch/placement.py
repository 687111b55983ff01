"""Where a run's processes are: started on this machine, or wherever a cluster puts them."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.weights.weight_transfer import Deliver
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.managed_process import Process, start_with_socket
from agentrl_cli.launch.processes.trainer_protocol import ClusterAddress, RunningServers
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import Observer
from agentrl_cli.scratch_folders import ScratchFolder
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.working_copy import FolderOwner
from agentrl_cli.train.rendezvous import Rendezvous


class Servers(Protocol):
    """The engine servers of a run; see :class:`ServerGroup`, whose methods these are."""

    @property
    def servers(self) -> RunningServers: ...
    def check(self) -> None: ...
    def wait(self) -> RunningServers: ...
    def end_with_servers(self, engine: InferenceEngine) -> None: ...


class Placement(Protocol):
    """How the processes of a run are started, and how they reach each other."""

    cluster: ClusterAddress | None
    """What a trainer needs to do the same; None: nothing."""
    rendezvous: Rendezvous | None
    """Of this process, where it is itself rank 0 of several; None: it starts the ranks."""

    @property
    def deliver(self) -> Deliver | None:
        """Brings files of weights to servers; None: they see them here."""
        ...

    def describe(self, config: ExperimentConfig, run: ResolvedRun) -> list[str]:
        """Where the processes would be, a line each, as far as that is not this machine."""
        ...

    def reserve(
        self, config: ExperimentConfig, run: ResolvedRun, observer: Observer, stack: ExitStack
    ) -> None:
        """Makes sure that there is room for all processes, until the ``stack`` closes.

        Raises:
            UserInputError: there is none.
        """
        ...

    def start_servers(
        self,
        config: ExperimentConfig,
        run: ResolvedRun,
        model_folder: str,
        stack: ExitStack,
        *,
        log_dir: Path,
        observer: Observer,
    ) -> Servers:
        """Begins to start the engine servers; ``stack`` ends them. See :class:`ServerGroup`."""
        ...

    def start_process(
        self, planned: PlannedProcess, log_path: Path
    ) -> tuple[Process, socket.socket]:
        """Starts a trainer or a rollout worker; see :data:`StartProcess`."""
        ...

    def name_owner(self, folder: RunFolder) -> FolderOwner:
        """How new trainers, and no earlier ones, find and join the run folder of this process."""
        ...

    def make_rendezvous(self, stack: ExitStack) -> str:
        """A new address at which the trainer's ranks meet, until the ``stack`` closes."""
        ...

    def follow_servers(self, router: EngineRouter) -> None:
        """Tells the router from now on when a server's endpoint changes."""
        ...


class LocalPlacement:
    """Everything is on this machine; see :class:`Placement`."""

    cluster: ClusterAddress | None = None
    deliver: Deliver | None = None

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        self.rendezvous = rendezvous

    def describe(self, config: ExperimentConfig, run: ResolvedRun) -> list[str]:
        """Nothing, but for the ranks that torchrun has started."""
        if self.rendezvous is None:
            return []
        return [f"the trainer is rank 0 of {self.rendezvous.count}, started by torchrun"]

    def reserve(
        self, config: ExperimentConfig, run: ResolvedRun, observer: Observer, stack: ExitStack
    ) -> None:
        """What a machine has is not counted."""

    def start_servers(
        self,
        config: ExperimentConfig,
        run: ResolvedRun,
        model_folder: str,
        stack: ExitStack,
        *,
        log_dir: Path,
        observer: Observer,
    ) -> ServerGroup:
        """The group of servers on this machine."""
        servers = ServerGroup(config, run, model_folder, log_dir=log_dir, observer=observer)
        return stack.enter_context(servers)

    def start_process(
        self, planned: PlannedProcess, log_path: Path
    ) -> tuple[Process, socket.socket]:
        """A child of this process."""
        return start_with_socket(planned, log_path)

    def name_owner(self, folder: RunFolder) -> FolderOwner:
        """As it is."""
        return folder.owner

    def make_rendezvous(self, stack: ExitStack) -> str:
        """A file that only this user can open."""
        folder = stack.enter_context(ScratchFolder("ranks"))
        return f"file://{folder.path}/rendezvous"

    def follow_servers(self, router: EngineRouter) -> None:
        """A server of this machine keeps its endpoint."""
