"""The engine servers of a run: started together, kept running, ended in order."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.engine_server import EngineServer
from agentrl_cli.engine.protocol import InferenceEngine, ServerEndpoint
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.sglang.sglang_server import SglangServer
from agentrl_cli.engine.vllm.vllm_server import VllmServer
from agentrl_cli.engine.weights.weight_folders import check_writable
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import AgentrlError, EngineError, UserInputError
from agentrl_cli.launch.plan import PlannedProcess, build_plan
from agentrl_cli.launch.processes.managed_process import ManagedProcess
from agentrl_cli.launch.processes.trainer_spec import RunningServers
from agentrl_cli.launch.servers.server_commands import format_sglang_settings
from agentrl_cli.launch.servers.server_supervisor import ServerSupervisor, explain_taken_port
from agentrl_cli.log import Observer

#: What servers have no use for: they run no agents and send no reports. (A token of the model hub
#: stays: they may have to fetch the model.)
_SECRET_NAME = re.compile(r"_API_KEY$|_SECRET$|^AGENTRL_")
#: Would go before the server's own arguments.
_OVERRIDING = frozenset({"VLLM_CPU_KVCACHE_SPACE"})
_POLL_SECONDS = 0.1
#: For the supervision to find out why a server is gone, after a call that failed with it.
_VERDICT_SECONDS = 3.0


class ServerGroup:
    """The configuration's engine servers on this machine. Safe to use from any thread.

    A server that dies or hangs is restarted, at the same endpoint, as often as
    ``engine.max_restarts`` allows within an hour. As a context manager it starts the servers,
    which may take minutes (:meth:`wait`), and ends them when the block does; an error of the
    engine inside the block becomes that of the servers, if they have one.

    Args:
        config: the experiment.
        run: what it comes to on this machine, with its packages and its model.
        model_folder: folder or hub id of the model that is loaded.
        log_dir: gets a log for each server; made if it does not exist.
        observer: gets messages about the servers.

    Attributes:
        endpoints: where the servers listen, or will.
        run: the run that they are servers of.
        on_failed: called once, from another thread, when a server cannot be kept running.

    Raises:
        UserInputError: the servers cannot be started as configured.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run: ResolvedRun,
        model_folder: str,
        *,
        log_dir: Path,
        observer: Observer,
        on_failed: Callable[[AgentrlError], None] | None = None,
    ) -> None:
        self.on_failed = on_failed
        self.run = run
        if run.purpose == "train":
            check_writable(config.engine.weight_transfer.dir)
        self._config = config
        self._observer = observer
        self._log_dir = log_dir
        self._lock = threading.Lock()
        self._is_started = False
        self._stopped = threading.Event()
        self._error: AgentrlError | None = None
        with ExitStack() as stack:
            ports = ReservedPorts(config.engine.num_servers, config.engine.first_port)
            stack.callback(ports.close)
            key_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-keys-"))
            plan = build_plan(
                config,
                run,
                model_folder=model_folder,
                ports=ports.ports,
                key_dir=key_dir,
            )
            servers = [process for process in plan if process.role == "engine"]
            self._supervisors = [
                self._build_supervisor(process, port, Path(key_dir))
                for process, port in zip(servers, ports.ports, strict=True)
            ]
            self._stack = stack.pop_all()
        self.endpoints = [supervisor.endpoint for supervisor in self._supervisors]

    def _build_supervisor(
        self, planned: PlannedProcess, port: int, key_dir: Path
    ) -> ServerSupervisor:
        # Begins as keys do that agentrl's logs leave out.
        key = f"sk-{secrets.token_urlsafe(32)}"
        log_path = self._log_dir / f"{planned.name}.log"
        env = dict(planned.env)
        if self.run.engine_kind == "sglang":
            path = key_dir / f"{planned.name}.yaml"
            path.write_text(format_sglang_settings(key), encoding="utf-8")
        else:
            env["VLLM_API_KEY"] = key
        return ServerSupervisor(
            ServerEndpoint(
                name=planned.name,
                base_url=f"http://127.0.0.1:{port}",
                api_key=key,
                log_path=str(log_path),
            ),
            ManagedProcess(planned.name, planned.argv, env, log_path, base_env=clean_environment()),
            self._config,
            self._observer,
            self._fail,
            kind=self.run.engine_kind,
            on_cpu=planned.devices == "cpu",
        )

    @property
    def processes(self) -> list[ManagedProcess]:
        """The servers' processes, in the order of ``endpoints``."""
        return [supervisor.process for supervisor in self._supervisors]

    @property
    def servers(self) -> RunningServers:
        """Where the servers listen, or will."""
        return RunningServers(run=self.run, endpoints=tuple(self.endpoints))

    def start(self) -> None:
        """Begins to start all servers; returns at once.

        Raises:
            EngineError: it was stopped, or there is no place for logs.
        """
        with self._lock:
            if self._is_started or self._stopped.is_set():
                return
            self._is_started = True
            try:
                self._log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise EngineError(f"the folder for logs cannot be made: {error}") from error
            names = [endpoint.name for endpoint in self.endpoints]
            which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            self._observer.on_message(f"starting {which} (logs: {self._log_dir})")
            for supervisor in self._supervisors:
                supervisor.start()

    def check(self) -> None:
        """Returns unless a server could not be started, or has failed too often.

        Raises:
            UserInputError: a server refuses what the configuration asks for.
            EngineTimeoutError: ``engine.start_timeout_seconds`` have passed.
            EngineError: a server failed in another way.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> RunningServers:
        """The servers, once they are ready.

        Raises:
            AgentrlError: as :meth:`check`, or :meth:`stop` was called.
        """
        # The supervisors have deadlines of their own.
        while not all(supervisor.has_been_ready for supervisor in self._supervisors):
            self.check()
            if self._stopped.is_set():
                raise EngineError("the engine servers were stopped before they were ready")
            time.sleep(_POLL_SECONDS)
        return self.servers

    def end_with_servers(self, engine: InferenceEngine) -> None:
        """Lets the engine's calls fail as soon as a server is given up: they would wait for it."""
        if isinstance(engine, EngineRouter):
            self.on_failed = engine.fail
            if self._error is not None:
                engine.fail(self._error)

    def stop(self) -> None:
        """Ends all servers, also while they start; may be called twice.

        Calls in flight get a few seconds; what does not end then is killed.
        """
        self._stopped.set()
        with self._lock:
            for supervisor in self._supervisors:
                supervisor.request_stop()
            for supervisor in self._supervisors:
                supervisor.stop()
            self._stack.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            if isinstance(error, EngineError):
                self._explain(error)
        finally:
            self.stop()

    def _explain(self, error: EngineError) -> None:
        """Raises the servers' own error, of which ``error`` may be a consequence.

        It may become known only a moment later.
        """
        deadline = time.monotonic() + _VERDICT_SECONDS
        while self._error is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if self._error is not None and self._error is not error:
            raise self._error from error

    def _fail(self, error: AgentrlError) -> None:
        if self._error is not None or self._stopped.is_set():
            return
        self._error = error
        if self.on_failed is not None:
            self.on_failed(error)


def clean_environment() -> dict[str, str]:
    """The environment of this process without what is none of the servers' business."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET_NAME.search(name) and name not in _OVERRIDING
    }


class NoServers:
    """Stands for a server group where the engine is in the trainer's own process."""

    def __init__(self, run: ResolvedRun) -> None:
        self.servers = RunningServers(run=run)

    def check(self) -> None:
        """Returns: there is nothing that could fail."""


async def open_router(
    config: ExperimentConfig,
    model_folder: str,
    servers: RunningServers,
    version: int | None,
    tied_names: Mapping[str, str],
    on_message: Callable[[str], None] | None = None,
) -> EngineRouter:
    """A router whose servers, one of them at least, are ready for calls.

    Args:
        config: the experiment's.
        model_folder: folder or hub id that the servers loaded.
        servers: where they listen.
        version: what their weights are called; None: the first publication will say.
        tied_names: further name of a tensor -> the name under which it is published.
        on_message: gets what a person should know, a line each.

    Raises:
        EngineError: none became ready in time.
    """
    router = EngineRouter(
        [_open_server(config, servers, endpoint) for endpoint in servers.endpoints],
        config.engine,
        model_name=config.model.path,
        transfer=build_weight_transfer(
            config,
            model_folder=model_folder,
            kind=servers.run.weight_transfer,
            tied_names=tied_names if servers.run.untied_head else {},
            on_message=on_message,
        ),
        shares_gpu=servers.run.shares_gpu,
    )
    try:
        await router.start(version)
    except BaseException:
        await router.close()
        raise
    return router


def _open_server(
    config: ExperimentConfig, servers: RunningServers, endpoint: ServerEndpoint
) -> EngineServer:
    if servers.run.engine_kind == "sglang":
        return SglangServer(endpoint, config.engine)
    return VllmServer(endpoint, config.engine)


class ReservedPorts:
    """Ports that no other program is given by chance, also while their server is being restarted.

    A socket that is bound and does not listen holds each: the system gives the port to no program
    that asks for any, and a server, which asks for this very one with SO_REUSEADDR, gets it.

    Args:
        num_ports: how many.
        first_port: the first of consecutive ones; None: any that are free.

    Raises:
        UserInputError: one of the consecutive ports is taken.
        EngineError: the system has no port left.
    """

    def __init__(self, num_ports: int, first_port: int | None) -> None:
        self.ports: list[int] = []
        with ExitStack() as stack:
            for index in range(num_ports):
                holder = stack.enter_context(socket.socket())
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(holder, 0 if first_port is None else first_port + index, num_ports)
                self.ports.append(holder.getsockname()[1])
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Gives the ports back; may be called twice."""
        self._stack.close()


def _bind(holder: socket.socket, port: int, num_ports: int) -> None:
    try:
        holder.bind(("127.0.0.1", port))
    except OSError as error:
        if port == 0:
            raise EngineError(f"there is no free port for an engine server: {error}") from error
        raise UserInputError(explain_taken_port(port, num_ports)) from error
