"""The engine servers of a run: started while something else is done, ended with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.engine.router import EngineRouter
from agentrl_cli.engine.server import ServerEndpoint
from agentrl_cli.errors import AgentrlError, EngineError
from agentrl_cli.launch.devices import Purpose
from agentrl_cli.launch.handover import RunningServers
from agentrl_cli.launch.interpreter import find_server_package
from agentrl_cli.launch.plan import resolve_engine_kind
from agentrl_cli.launch.servers import ServerFleet
from agentrl_cli.log import Observer

#: What a fleet may take longer than its own deadline before nobody waits for it.
_GRACE_SECONDS = 60.0
_POLL_SECONDS = 0.1
_VERDICT_SECONDS = 3.0


class Fleet(Protocol):
    """The engine servers, as whoever starts them needs them."""

    on_failed: Callable[[AgentrlError], None] | None
    """Called from another thread once ``error`` is set."""

    @property
    def endpoints(self) -> Sequence[ServerEndpoint]:
        """Where they listen; known before they do."""
        ...

    @property
    def untied_head(self) -> bool:
        """True: they keep an output head of their own."""
        ...

    @property
    def shares_gpu(self) -> bool:
        """True: the trainer computes on a GPU of theirs."""
        ...

    @property
    def error(self) -> AgentrlError | None:
        """Set once a server has died too often."""
        ...

    def start(self) -> None:
        """Starts them and waits until they are ready."""
        ...

    def stop(self) -> None:
        """Ends them, also while they start."""
        ...


class NoServers:
    """Stands for a fleet where the engine is in the trainer's own process."""

    servers = None

    def check(self) -> None:
        """Returns: there is nothing that could fail."""


class StartingFleet:
    """A fleet that is started in a thread, so that a model is loaded meanwhile."""

    def __init__(self, fleet: Fleet, config: ExperimentConfig, num_gpus: int) -> None:
        self._fleet = fleet
        self._config = config
        self._num_gpus = num_gpus
        self._start_error: BaseException | None = None
        self._thread = threading.Thread(target=self._start, name="agentrl-servers", daemon=True)
        self._thread.start()

    def _start(self) -> None:
        try:
            self._fleet.start()
        except BaseException as error:
            self._start_error = error

    @property
    def servers(self) -> RunningServers:
        """Where the servers listen, or will."""
        kind = resolve_engine_kind(self._config, self._num_gpus)
        assert kind != "embedded"
        return RunningServers(
            kind=kind,
            endpoints=tuple(self._fleet.endpoints),
            untied_head=self._fleet.untied_head,
            num_gpus=self._num_gpus,
            shares_gpu=self._fleet.shares_gpu,
        )

    def end_with_servers(self, engine: InferenceEngine) -> None:
        """Lets the engine's calls fail as soon as a server is given up: they would wait for it."""
        if isinstance(engine, EngineRouter):
            self._fleet.on_failed = engine.fail
            if self._fleet.error is not None:
                engine.fail(self._fleet.error)

    def check(self) -> None:
        """Returns unless the servers could not be started, or have died too often.

        Raises:
            AgentrlError: why.
        """
        if self._start_error is not None:
            raise self._start_error
        if self._fleet.error is not None:
            raise self._fleet.error

    def wait(self) -> RunningServers:
        """The servers, once they are ready.

        Raises:
            AgentrlError: they are not, and why.
        """
        timeout_seconds = self._config.engine.start_timeout_seconds + _GRACE_SECONDS
        self._thread.join(timeout_seconds)
        self.check()
        if self._thread.is_alive():
            raise EngineError(
                f"the engine servers were not ready after {timeout_seconds:g} s "
                "(engine.start_timeout_seconds and a minute)"
            )
        return self.servers

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Inside the block an error of the engine becomes that of the servers, if they have one.

        Who loses its servers may say so before the fleet knows why they are gone.
        """
        try:
            yield
        except EngineError as error:
            deadline = time.monotonic() + _VERDICT_SECONDS
            while True:
                try:
                    self.check()
                except AgentrlError as verdict:
                    if verdict is error:
                        break
                    raise verdict from error
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
            raise


def needs_servers(config: ExperimentConfig, num_gpus: int) -> bool:
    """True where the engine is not in the trainer's own process."""
    return resolve_engine_kind(config, num_gpus) != "embedded"


def find_server_versions(config: ExperimentConfig, *, num_gpus: int) -> dict[str, str]:
    """Version of the package that servers run on, by name; empty for the embedded engine.

    Raises:
        UserInputError: it is not installed, or is of a version that agentrl does not know.
    """
    package = find_server_package(config, num_gpus=num_gpus)
    return {} if package is None else {package.distribution: package.version}


@contextmanager
def open_fleet(
    config: ExperimentConfig,
    model_folder: str,
    *,
    purpose: Purpose,
    num_gpus: int,
    log_dir: Path,
    observer: Observer,
) -> Iterator[StartingFleet]:
    """Starts the configuration's servers, and ends them when the block does.

    What the block fails with because its servers died too often becomes the fleet's error.

    Args:
        config: the experiment's.
        model_folder: folder or hub id of the model.
        purpose: ``train``: the servers will get weights; ``eval``: they keep the model's.
        num_gpus: of this machine.
        log_dir: gets a log for each server.
        observer: is told what happens to the servers.
    """
    with closing_fleet(
        ServerFleet(
            config,
            model_folder,
            purpose=purpose,
            num_gpus=num_gpus,
            log_dir=log_dir,
            observer=observer,
        ),
        config,
        num_gpus,
    ) as starting:
        yield starting


@contextmanager
def closing_fleet(fleet: Fleet, config: ExperimentConfig, num_gpus: int) -> Iterator[StartingFleet]:
    """As :func:`open_fleet`, of a fleet that was made elsewhere."""
    try:
        starting = StartingFleet(fleet, config, num_gpus)
        with starting.explaining():
            yield starting
    finally:
        fleet.stop()
