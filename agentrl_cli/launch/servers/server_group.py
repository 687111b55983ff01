"""The engine servers of a run: started together, kept running, ended in order."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import FREE_PORT, ResolvedRun, ResolvedServer
from agentrl_cli.engine.protocol import InferenceEngine, ServerEndpoint, WeightTransfer
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.engine.router.server_clients import open_clients
from agentrl_cli.engine.weights.weight_folders import check_writable
from agentrl_cli.errors import AgentrlError, EngineError, UserInputError
from agentrl_cli.launch.plan import PlannedProcess, build_plan
from agentrl_cli.launch.processes.managed_process import ManagedProcess
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.servers.server_supervisor import ServerSupervisor, explain_taken_port
from agentrl_cli.log import Observer
from agentrl_cli.scratch_folders import ScratchFolder, remove_semaphores

#: What servers have no use for, as they run no agents and send no reports (a token of the model
#: hub stays: they may have to fetch the model), and what would go before their own arguments.
_REMOVED_VARIABLES = re.compile(r"_API_KEY$|_SECRET$|^AGENTRL_|^VLLM_CPU_KVCACHE_SPACE$")
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
        if run.purpose == "train":
            check_writable(config.engine.weight_transfer.dir)
        self._config = config
        self._observer = observer
        self._log_dir = log_dir
        self._stopped = threading.Event()
        self._error: AgentrlError | None = None
        with ExitStack() as stack:
            self.run = _reserve_ports(config, run, stack)
            private_dir = stack.enter_context(ScratchFolder("servers")).path
            # Of servers that were killed.
            stack.callback(remove_semaphores, private_dir)
            plan = build_plan(
                config, self.run, model_folder=model_folder, private_dir=str(private_dir)
            )
            servers = [process for process in plan if process.role == "engine"]
            self._supervisors = [
                self._build_supervisor(process, server, private_dir)
                for process, server in zip(servers, self.run.servers, strict=True)
            ]
            self._stack = stack.pop_all()
        self.endpoints = [supervisor.endpoint for supervisor in self._supervisors]
        self.processes = [supervisor.process for supervisor in self._supervisors]

    def _build_supervisor(
        self, planned: PlannedProcess, server: ResolvedServer, private_dir: Path
    ) -> ServerSupervisor:
        # Begins as keys do that agentrl's logs leave out.
        key = f"sk-{secrets.token_urlsafe(32)}"
        log_path = self._log_dir / f"{planned.name}.log"
        env = dict(planned.env)
        if self.run.engine_kind == "sglang":
            path = private_dir / f"{planned.name}.yaml"
            path.write_text(format_sglang_settings(key), encoding="utf-8")
        else:
            env["VLLM_API_KEY"] = key
        kept = {k: v for k, v in os.environ.items() if not _REMOVED_VARIABLES.search(k)}
        return ServerSupervisor(
            ServerEndpoint(
                name=planned.name,
                base_url=f"http://{server.host}:{server.port}",
                api_key=key,
                log_path=str(log_path),
            ),
            ManagedProcess(planned.name, planned.argv, env, log_path, base_env=kept),
            self._config,
            self._observer,
            self._fail,
            kind=self.run.engine_kind,
            on_cpu=planned.devices == "cpu",
        )

    @property
    def servers(self) -> RunningServers:
        """Where the servers listen, or will."""
        return RunningServers(run=self.run, endpoints=tuple(self.endpoints))

    @property
    def have_been_ready(self) -> bool:
        """True once all have answered, whatever came after."""
        return all(supervisor.has_been_ready for supervisor in self._supervisors)

    def start(self) -> None:
        """Begins to start all servers, once; returns at once.

        Raises:
            EngineError: there is no place for logs.
        """
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"the folder for logs cannot be made: {error}") from error
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
        while not self.have_been_ready:
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
        for supervisor in self._supervisors:
            supervisor.request_stop()
        for supervisor in self._supervisors:
            supervisor.join()
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


def format_sglang_settings(api_key: str) -> str:
    """The content of the file from which an SGLang server reads its key."""
    return f"api-key: {json.dumps(api_key)}\n"


async def open_router(
    config: ExperimentConfig,
    servers: RunningServers,
    transfer: WeightTransfer,
    version: int | None,
    on_open: Callable[[EngineRouter], None] = lambda _: None,
) -> EngineRouter:
    """A router whose servers, one of them at least, are ready for calls.

    Args:
        transfer: how weights reach them; the router closes it.
        version: what their weights are called; None: the first publication will say.
        on_open: called with the router before it waits for them.

    Raises:
        EngineError: none became ready in time.
    """
    router = EngineRouter(
        open_clients(servers.run.engine_kind, servers.endpoints, config.engine),
        config.engine,
        model_name=config.model.path,
        transfer=transfer,
        shares_gpu=servers.run.shares_gpu,
    )
    on_open(router)
    try:
        await router.start(version)
    except BaseException:
        await router.close()
        raise
    return router


def _reserve_ports(config: ExperimentConfig, run: ResolvedRun, stack: ExitStack) -> ResolvedRun:
    """The run, with a port for each server that no other program is given by chance.

    Also while the server is being restarted, until the ``stack`` closes: a socket that is bound and
    does not listen holds it. The system gives the port to no program that asks for any, and a
    server, which asks for this very one with SO_REUSEADDR, gets it.

    Raises:
        UserInputError: a port from ``engine.first_port`` on is taken.
        EngineError: the system has no port left.
    """
    servers = []
    for server in run.servers:
        holder = stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((server.host, server.port))
        except OSError as error:
            if server.port == FREE_PORT:
                raise EngineError(f"there is no free port for an engine server: {error}") from error
            raise UserInputError(
                explain_taken_port(server.port, config.engine.num_servers)
            ) from error
        servers.append(server.model_copy(update={"port": holder.getsockname()[1]}))
    return run.model_copy(update={"servers": tuple(servers)})
