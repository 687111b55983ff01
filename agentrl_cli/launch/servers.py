"""The engine servers of a run: started together, kept running, ended in order."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Self

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.engine.sglang_command import format_settings
from agentrl_cli.engine.weight_transfer_folder import check_writable
from agentrl_cli.errors import AgentrlError, EngineError, UserInputError
from agentrl_cli.launch.devices import Purpose, shares_any_gpu
from agentrl_cli.launch.head import needs_untied_head
from agentrl_cli.launch.interpreter import find_server_package
from agentrl_cli.launch.machine import Machine
from agentrl_cli.launch.plan import PlannedProcess, build_plan, resolve_engine_kind
from agentrl_cli.launch.ports import ReservedPorts
from agentrl_cli.launch.process import ManagedProcess
from agentrl_cli.launch.server_keeper import ServerKeeper
from agentrl_cli.log import Observer

#: What servers have no use for: they run no agents and report to nobody. (A token of the
#: model hub stays: they may have to fetch the model.)
_SECRET_NAME = re.compile(r"_API_KEY$|_SECRET$|^AGENTRL_")
#: Would go before the server's own arguments.
_OVERRIDING = frozenset({"VLLM_CPU_KVCACHE_SPACE"})
_POLL_SECONDS = 0.1


class ServerFleet:
    """The configuration's engine servers on this machine. Safe to use from any thread.

    A server that dies or hangs is started again, at the same endpoint, as often as
    ``engine.max_restarts`` allows within an hour. As a context manager it starts the servers
    and stops them.

    Args:
        config: the experiment.
        model_folder: folder or hub id of the model that is loaded.
        purpose: servers for training can be given weights.
        num_gpus: of this machine.
        log_dir: gets a log for each server; made if it is not there.
        observer: is told what happens to the servers.

    Attributes:
        endpoints: where the servers listen, or will.
        untied_head: they have an output head of their own, which must be published too.
        on_failed: called once, from another thread, when a server cannot be kept running.

    Raises:
        UserInputError: the servers cannot be started as configured.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        model_folder: str,
        *,
        purpose: Purpose,
        num_gpus: int,
        log_dir: Path,
        observer: Observer,
        on_failed: Callable[[AgentrlError], None] | None = None,
    ) -> None:
        self.on_failed = on_failed
        self.untied_head = needs_untied_head(
            config, model_folder, purpose=purpose, num_gpus=num_gpus
        )
        self.shares_gpu = shares_any_gpu(config.engine, num_gpus, purpose)
        self._kind = resolve_engine_kind(config, num_gpus)
        if self._kind == "sglang" and self.shares_gpu:
            raise UserInputError(
                "engine.kind: sglang needs GPUs apart from the trainer's, and of the "
                f"{num_gpus} here none is left beside {config.engine.num_servers} servers of "
                f"{config.engine.tensor_parallel_size}. Type engine.kind=vllm, which can share one"
            )
        find_server_package(config, num_gpus=num_gpus)
        if purpose == "train":
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
                _describe_machine(num_gpus),
                purpose=purpose,
                model_folder=model_folder,
                untied_head=self.untied_head,
                ports=ports.ports,
                key_dir=key_dir,
            )
            servers = [process for process in plan if process.role == "engine"]
            self._keepers = [
                self._build_keeper(process, port, Path(key_dir))
                for process, port in zip(servers, ports.ports, strict=True)
            ]
            self._stack = stack.pop_all()
        self.endpoints = [keeper.endpoint for keeper in self._keepers]

    def _build_keeper(self, planned: PlannedProcess, port: int, key_dir: Path) -> ServerKeeper:
        # Begins as keys do that agentrl's logs leave out.
        key = f"sk-{secrets.token_urlsafe(32)}"
        log_path = self._log_dir / f"{planned.name}.log"
        env = dict(planned.env)
        if self._kind == "sglang":
            path = key_dir / f"{planned.name}.yaml"
            path.write_text(format_settings(key), encoding="utf-8")
        else:
            env["VLLM_API_KEY"] = key
        return ServerKeeper(
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
            on_cpu=planned.devices == "cpu",
            has_engine_process=self._kind == "vllm",
        )

    @property
    def error(self) -> AgentrlError | None:
        """Why a server could not be started, or kept running; None while all is well."""
        return self._error

    @property
    def processes(self) -> list[ManagedProcess]:
        """The servers' processes, in the order of ``endpoints``."""
        return [keeper.process for keeper in self._keepers]

    def start(self) -> None:
        """Starts all servers and returns when they are ready; at once if they are.

        Raises:
            UserInputError: a server refuses what the configuration asks for.
            EngineTimeoutError: ``engine.start_timeout_seconds`` have passed.
            EngineError: a server failed in another way, or :meth:`stop` was called.
        """
        try:
            with self._lock:
                if not self._is_started and not self._stopped.is_set():
                    self._is_started = True
                    self._begin()
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _begin(self) -> None:
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"the folder for logs cannot be made: {error}") from error
        names = [keeper.endpoint.name for keeper in self._keepers]
        which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        self._observer.on_message(f"starting {which} (logs: {self._log_dir})")
        for keeper in self._keepers:
            keeper.start()

    def _wait(self) -> None:
        # The keepers have deadlines of their own.
        while not all(keeper.has_been_ready for keeper in self._keepers):
            if self._error is not None:
                raise self._error
            if self._stopped.is_set():
                raise EngineError("the engine servers were stopped before they were ready")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends all servers, also while they start; may be called twice.

        Calls in flight get a few seconds; what does not end then is killed.
        """
        self._stopped.set()
        with self._lock:
            for keeper in self._keepers:
                keeper.request_stop()
            for keeper in self._keepers:
                keeper.stop()
            self._stack.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _fail(self, error: AgentrlError) -> None:
        if self._error is not None or self._stopped.is_set():
            return
        self._error = error
        if self.on_failed is not None:
            self.on_failed(error)


def clean_environment() -> dict[str, str]:
    """The environment of this process without what servers have no business with."""
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET_NAME.search(name) and name not in _OVERRIDING
    }


def _describe_machine(num_gpus: int) -> Machine:
    machine = Machine.detect()
    if machine.num_gpus == num_gpus:
        return machine
    return replace(machine, gpu_ids=tuple(map(str, range(num_gpus))))
