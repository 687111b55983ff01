"""A Ray cluster: joined or started, what it has, and the room in it that a run reserves."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray.exceptions import AuthenticationError, RuntimeEnvSetupError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from agentrl_cli.config.experiment import ExperimentConfig, LauncherConfig
from agentrl_cli.config.resolved_run import Machine, ResolvedRun
from agentrl_cli.errors import UserInputError
from agentrl_cli.launch.processes.trainer_protocol import ClusterAddress
from agentrl_cli.log import Observer, get_logger
from agentrl_cli.store.layout import is_url

_log = get_logger(__name__)

_CONNECT_SECONDS = 10.0
_REMINDER_SECONDS = 10.0
#: Servers apart from each other, so that the loss of a node takes few of them along; ranks close to
#: each other, since they exchange the most.
_STRATEGIES = {"engine": "SPREAD", "trainer": "PACK", "rollout": "SPREAD"}
#: Folders of tools, not copied with the current folder.
_HIDDEN = ".*/"

#: Where its head has a token, a cluster of Ray 2.60 takes nobody without it.
TOKEN_ADVICE = (
    "If the cluster asks for a token, have its head's ~/.ray/auth_token on this machine too, and "
    "type RAY_AUTH_MODE=token before the command"
)

Role = Literal["engine", "trainer", "rollout"]
Bundle = dict[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """What each process of a role needs of one node, and how many there are."""

    role: Role
    bundle: Mapping[str, float]
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.role} with {format_resources(self.bundle)}"


def format_resources(resources: Mapping[str, float]) -> str:
    """``CPU: 4, GPU: 1``, without what Ray adds for itself."""
    own = ("node:", "object_store_memory", "memory", "accelerator_type:")
    shown = {k: v for k, v in sorted(resources.items()) if not k.startswith(own)}
    return ", ".join(f"{name}: {value:g}" for name, value in shown.items()) or "nothing"


def connect(config: ExperimentConfig, stack: ExitStack) -> ClusterAddress:
    """Joins the cluster, or starts one on this machine where there is none; ``stack`` leaves it.

    The other nodes get a copy of the current folder, in which agents and rewards are looked for.

    Raises:
        UserInputError: it does not answer.
    """
    address, namespace = config.launcher.address, f"agentrl-{secrets.token_hex(8)}"
    check_reachable(address or os.environ.get("RAY_ADDRESS"))
    env = {name: value for name, value in os.environ.items() if name.startswith("AGENTRL_")}
    if RAY_JOB_CONFIG_JSON_ENV_VAR in os.environ:
        # A job's folder is a copy that all nodes have.
        check_output_dir(config)
        _init(address, namespace, runtime_env={"env_vars": env})
    else:
        folder = describe_current_folder(config)
        with explained_copy():
            _init(address, namespace, runtime_env={**folder, "env_vars": env})
    stack.callback(ray.shutdown)
    return ClusterAddress(
        address=ray.get_runtime_context().gcs_address,
        namespace=namespace,
        start_seconds=config.launcher.placement_timeout_seconds,
    )


def describe_current_folder(config: ExperimentConfig) -> dict[str, Any]:
    """What Ray copies to the nodes, as a part of its ``runtime_env``."""
    # Data that git does not know is needed all the same.
    os.environ.setdefault("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    excluded = [_HIDDEN, os.path.relpath(config.output_dir), *_list_special_files()]
    return {"working_dir": str(Path.cwd()), "excludes": excluded}


@contextmanager
def explained_copy() -> Iterator[None]:
    """Says what to do where the nodes cannot have a copy of the current folder.

    Raises:
        UserInputError: they cannot.
    """
    try:
        yield
    except RuntimeEnvSetupError as error:
        reason = str(error).partition(" To exclude")[0].splitlines()[-1]
        raise UserInputError(
            f"the nodes cannot have a copy of the current folder, {Path.cwd()}: {reason} Type the "
            "command in a folder that holds what agents and rewards need and little else, or name "
            "the rest in a file .rayignore, as in a .gitignore (run folders, and folders that "
            "begin with a dot, are left out)"
        ) from error


def check_output_dir(config: ExperimentConfig) -> None:
    """Refuses a place for run folders that would be deleted with a job.

    Raises:
        UserInputError: it is.
    """
    if not (is_url(config.output_dir) or Path(config.output_dir).is_absolute()):
        raise UserInputError(
            f"output_dir: {config.output_dir} would be in a Ray job's copy of the current folder, "
            "which is deleted after it. Type output_dir=/FOLDER for one on the cluster's head, or "
            "the URL of object storage, such as output_dir=s3://BUCKET/runs"
        )


def join(cluster: ClusterAddress) -> None:
    """Joins the cluster from a process that was placed on it."""
    _init(cluster.address, cluster.namespace)


def silence() -> None:
    """Keeps Ray from printing every event of the cluster on the terminal of whoever has joined it;
    what matters of them is said in agentrl's own messages."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def _init(address: str | None, namespace: str, **options: Any) -> None:
    silence()
    try:
        ray.init(
            address=address,
            namespace=namespace,
            # What processes print is in their logs.
            log_to_driver=False,
            configure_logging=False,
            include_dashboard=None if address else False,
            **options,
        )
    except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
        raise UserInputError(
            f"launcher.address: no Ray cluster can be joined at {address or 'this machine'}: "
            f"{error}. Allowed: HOST:PORT of a head (ray start --head prints it); null for one on "
            f"this machine. {TOKEN_ADVICE}"
        ) from error


def _list_special_files() -> list[str]:
    """Pipes and sockets below the current folder, which Ray would wait for something to read from
    or fail to copy."""
    return [
        str(path.relative_to(Path.cwd()))
        for folder, _, names in os.walk(Path.cwd())
        for path in (Path(folder, name) for name in names)
        if not (path.is_file() or path.is_symlink())
    ]


def check_reachable(address: str | None) -> None:
    """Refuses ``HOST:PORT`` where nothing listens; any other way to name a cluster passes.

    Raises:
        UserInputError: nothing does.
    """
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise UserInputError(
            f"launcher.address: nothing answers at {address} ({error}). Start the cluster there "
            "(ray start --head), or type launcher.address=HOST:PORT with the address of its head, "
            "or launcher.address=null for a cluster on this machine"
        ) from error


def describe_machine() -> Machine:
    """The cluster as one machine: all its GPUs and cores."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    own = Machine.detect()
    return Machine(
        gpu_ids=tuple(map(str, range(int(resources.get("GPU", 0))))),
        num_cores=int(resources.get("CPU", 1)),
        num_nodes=len(list_nodes()),
        python_path=own.python_path,
        emulates_bfloat16=own.emulates_bfloat16,
    )


def list_nodes() -> list[dict[str, Any]]:
    """The nodes that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def describe_nodes() -> list[str]:
    """What each node has, a line each."""
    return [
        f"node {node['NodeManagerAddress']} has {format_resources(node['Resources'])}"
        for node in list_nodes()
    ]


def compute_demands(launcher: LauncherConfig, run: ResolvedRun) -> list[Demand]:
    """What the run needs of the cluster, by role."""
    own_cores = 1.0 if run.serves_on_gpu else float(run.num_server_threads)
    bundles: dict[Role, list[Bundle]] = {
        "engine": [{"CPU": own_cores, "GPU": len(server.gpus)} for server in run.servers],
        "trainer": [{"CPU": 1.0, "GPU": len(gpus)} for gpus in run.trainers],
        "rollout": [{"CPU": 1.0}] * run.num_rollout_workers,
    }
    demands = []
    for role, found in bundles.items():
        if found:
            bundle = {**found[0], **launcher.resources.get(role, {})}
            needed = {name: value for name, value in bundle.items() if value}
            demands.append(Demand(role, needed, len(found)))
    return demands


class Reservation:
    """Room in the cluster for each process of a run, until it is closed."""

    def __init__(
        self, demands: Sequence[Demand], launcher: LauncherConfig, observer: Observer
    ) -> None:
        """Returns when there is room.

        Raises:
            UserInputError: there was none within ``launcher.placement_timeout_seconds``.
        """
        self._groups: list[PlacementGroup] = []
        limit = launcher.placement_timeout_seconds
        deadline = time.monotonic() + limit
        try:
            for demand in demands:
                group = placement_group(
                    [dict(demand.bundle)] * demand.count,
                    strategy=_STRATEGIES[demand.role],
                    name=demand.role,
                )
                self._groups.append(group)
            for demand, group in zip(demands, self._groups, strict=True):
                while not group.wait(min(_REMINDER_SECONDS, max(0.1, deadline - time.monotonic()))):
                    if time.monotonic() >= deadline:
                        raise UserInputError(_explain_full(demands, demand, limit))
                    observer.on_message(f"waiting for room on the cluster for {demand}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the room back."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()


def _explain_full(demands: Sequence[Demand], missing: Demand, limit: float) -> str:
    needed = Counter[str]()
    for demand in demands:
        needed.update({name: value * demand.count for name, value in demand.bundle.items()})
    free = ray.available_resources()  # type: ignore[no-untyped-call]
    nodes = "".join(f"\n  {line}" for line in describe_nodes())
    return (
        f"launcher.kind: ray: after {limit:g} s (launcher.placement_timeout_seconds) the cluster "
        f"has no room for {missing}. The run needs {format_resources(needed)} in all: "
        f"{'; '.join(map(str, demands))}. The cluster has, {len(list_nodes())} nodes:{nodes}\n"
        f"and free is {format_resources(free)}. Add nodes, wait for what "
        "else runs there, or ask for less: engine.num_servers, engine.num_threads, "
        "train.num_processes, rollout.num_workers"
    )
