"""Processes placed on a Ray cluster; see :class:`~agentrl_cli.launch.placement.Placement`."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import Machine, ResolvedRun
from agentrl_cli.engine.protocol import ServerEndpoint
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.errors import EngineError
from agentrl_cli.launch.placement import Servers
from agentrl_cli.launch.plan import PlannedProcess
from agentrl_cli.launch.processes.managed_process import Process
from agentrl_cli.launch.processes.trainer_protocol import ClusterAddress
from agentrl_cli.launch.ray import cluster
from agentrl_cli.launch.ray.hosted_folder import ACTOR, SCHEME, FolderHost, HostedFiles
from agentrl_cli.launch.ray.remote_process import RemoteProcess, find_own_host
from agentrl_cli.launch.ray.remote_servers import RemoteServers
from agentrl_cli.launch.ray.traffic import describe_traffic
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.layout import is_url
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.working_copy import BACKENDS, FolderOwner
from agentrl_cli.train.rendezvous import Rendezvous

_log = get_logger(__name__)

#: Of a file of weights: what a node holds of it at a time, beside the file.
_PART_BYTES = 2**28
_RETRY_SECONDS = 2.0


class RayPlacement:
    """Each process is in an actor, in the room that the run has reserved.

    Args:
        address: where this process has joined it.
        start_seconds: how long to wait for room on the cluster.
        num_ranks: trainer processes.
    """

    rendezvous: Rendezvous | None = None

    def __init__(self, address: ClusterAddress, start_seconds: float, num_ranks: int) -> None:
        self.cluster: ClusterAddress | None = address
        self._namespace = address.namespace
        self._start_seconds = start_seconds
        self._num_ranks = num_ranks
        self._tasks: list[asyncio.Task[None]] = []
        self._parts: tuple[Path, dict[str, list[Any]]] | None = None
        self._host: Any = None

    def describe(self, config: ExperimentConfig, run: ResolvedRun) -> list[str]:
        """What is needed of the cluster, what each node has, and what goes between them."""
        demands = cluster.compute_demands(config.launcher, run)
        return [
            *(f"needs {demand}" for demand in demands),
            *cluster.describe_nodes(),
            *describe_traffic(config, run),
        ]

    def reserve(
        self, config: ExperimentConfig, run: ResolvedRun, observer: Observer, stack: ExitStack
    ) -> None:
        """Waits for room on the cluster."""
        demands = cluster.compute_demands(config.launcher, run)
        reservation = cluster.Reservation(demands, config.launcher, observer)
        stack.callback(reservation.close)

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
        """An actor for each server. Each loads the model by its name, on its own node."""
        options = [self.choose_place("engine", index) for index in range(len(run.servers))]
        servers = RemoteServers(config, run, options, log_dir=log_dir, observer=observer)
        return stack.enter_context(servers)

    def start_process(
        self, planned: PlannedProcess, log_path: Path
    ) -> tuple[Process, socket.socket]:
        """The process in an actor."""
        number = re.search(r"\d+$", planned.name)
        options = self.choose_place(planned.role, int(number[0]) if number else 0)
        process = RemoteProcess(
            planned, log_path, options=options, start_seconds=self._start_seconds
        )
        return process, process.connect()

    def choose_place(self, role: str, index: int) -> dict[str, Any]:
        """Options of the actor with the ``index``-th process of a role."""
        group = get_placement_group(role)
        bundle = dict(group.bundle_specs[index])
        return {
            "num_cpus": bundle.pop("CPU", 0),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            "namespace": self._namespace,
        }

    def name_owner(self, folder: RunFolder) -> FolderOwner:
        """On object storage, as it is; else through an actor on this machine."""
        owner = folder.owner
        if is_url(owner.location):
            # The copy of this process is on another machine.
            return folder.admit_trainer()._replace(copy_dir="")
        if self._host is None:
            here = ray.get_runtime_context().get_node_id()
            self._host = (
                ray.remote(num_cpus=0)(FolderHost)
                .options(
                    name=ACTOR, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
                )
                .remote(owner.location)
            )
        lease_id = ray.get(self._host.admit.remote(), timeout=self._start_seconds)
        return FolderOwner(owner.pid, f"{SCHEME}://{lease_id}", lease_id)

    def make_rendezvous(self, stack: ExitStack) -> str:
        """A free port of the node of rank 0."""
        if self._num_ranks == 1:
            return ""
        strategy = PlacementGroupSchedulingStrategy(get_placement_group("trainer"), 0)
        finding = ray.remote(num_cpus=0)(_find_free_port).options(scheduling_strategy=strategy)
        return str(ray.get(finding.remote(), timeout=self._start_seconds))

    async def deliver(self, server: str, folder: Path) -> Path:
        """The folder's copy in the memory of the server's node, through Ray's object store."""
        # The last one only: the object store is no place for what must last.
        if self._parts is None or self._parts[0] != folder:
            self._parts = folder, await asyncio.to_thread(_put_files, folder)
        actor = ray.get_actor(server, self._namespace)
        return Path(await actor.take_files.remote(folder.name, self._parts[1]))

    def follow_servers(self, router: EngineRouter) -> None:
        """A server whose node was lost is started on another: its actor tells."""
        for endpoint in router.endpoints:
            following = _follow(router, ray.get_actor(endpoint.name, self._namespace), endpoint)
            task = asyncio.create_task(following)
            task.add_done_callback(partial(_end_with, router))
            self._tasks.append(task)


def open_cluster(config: ExperimentConfig, stack: ExitStack) -> tuple[Machine, RayPlacement]:
    """The cluster of the configuration: as a machine, and as a place for a run's processes.

    Raises:
        UserInputError: it cannot be joined.
    """
    address = cluster.connect(config, stack)
    placement = RayPlacement(address, address.start_seconds, config.train.num_processes or 1)
    return cluster.describe_machine(), placement


def join_cluster(address: ClusterAddress, run: ResolvedRun) -> RayPlacement:
    """The placement of a run, for a trainer of it."""
    cluster.join(address)
    BACKENDS[SCHEME] = HostedFiles
    return RayPlacement(address, address.start_seconds, len(run.trainers))


def _end_with(router: EngineRouter, task: asyncio.Task[None]) -> None:
    """Ends the run where nobody would learn any more that a server has moved."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        router.fail(EngineError(f"an engine server cannot be followed: {error!r}"))


async def _follow(router: EngineRouter, actor: Any, endpoint: ServerEndpoint) -> None:
    while True:
        try:
            found = ServerEndpoint(**await actor.find_endpoint.remote(endpoint.base_url))
        except RayError as error:
            # Ray starts it elsewhere; where it cannot, the command finds out, and ends the run.
            _log.debug("%s does not say where it is: %s", endpoint.name, error)
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        if found != endpoint:
            _log.info("%s is at %s now", found.name, found.base_url)
            endpoint = found
            router.move(endpoint)


def _put_files(folder: Path) -> dict[str, list[Any]]:
    """The files of a folder in the object store, by name, in parts."""
    return {
        path.name: [
            ray.put(np.fromfile(path, np.uint8, _PART_BYTES, offset=start))
            for start in range(0, path.stat().st_size, _PART_BYTES)
        ]
        for path in folder.iterdir()
    }


def _find_free_port() -> str:
    host = find_own_host()
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"tcp://{host}:{probe.getsockname()[1]}"
