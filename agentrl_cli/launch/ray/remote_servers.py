"""Engine servers on the nodes of a cluster, each with its supervisor inside an actor.

Two things keep a server running: its supervisor restarts a process that dies or hangs, and Ray an
actor whose node is lost, elsewhere. Either way the router finds it unhealthy, and gives it the
current weights and verifies them before it serves again.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import InferenceEngine, ServerEndpoint
from agentrl_cli.engine.router.engine_router import EngineRouter
from agentrl_cli.errors import AgentrlError, EngineError, EngineTimeoutError, build_error
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.ray.remote_process import describe_loss, find_own_host, read_from
from agentrl_cli.launch.run_resolution import with_server_package
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.log import Observer, SilentObserver, get_logger
from agentrl_cli.models.builtin_models import resolve_model_folder
from agentrl_cli.models.model_files import open_whole_model
from agentrl_cli.scratch_folders import MEMORY_FOLDER, ScratchFolder

_log = get_logger(__name__)

_POLL_SECONDS = 0.1
_NEWS_SECONDS = 5.0
_ASK_SECONDS = 30.0
_STOP_SECONDS = 30.0
#: Versions of the weights whose files a node keeps: calls continue with the adapter that they
#: began with.
_NUM_KEPT = 16


class ServerActor:
    """One engine server and its supervisor, on the node where Ray has placed this actor.

    Each start, also one on another node, builds everything anew.
    """

    def __init__(self, config: str, run: str, index: int) -> None:
        self._config = ExperimentConfig.model_validate_json(config)
        self._run = ResolvedRun.model_validate_json(run)
        self._index = index
        self._incarnation = secrets.token_hex(8)
        self._observer = _Messages()
        self._group: ServerGroup | None = None
        self._error: AgentrlError | None = None
        self._folder = ScratchFolder("server")
        self._weights = ScratchFolder("weights", MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None)
        self._kept: list[Path] = []
        self._starting = threading.Thread(target=self._start, daemon=True)
        self._starting.start()

    def _start(self) -> None:
        try:
            server = self._run.servers[self._index]
            here = {"gpus": tuple(map(str, ray.get_gpu_ids())), "host": find_own_host()}
            servers = (server.model_copy(update=here),)
            run = self._run.model_copy(update={"servers": servers, "on_cluster": False})
            run = with_server_package(run, self._config)
            folder = resolve_model_folder(self._config.model.path, self._observer)
            self._whole = open_whole_model(folder, self._config.model.dtype)
            self._group = ServerGroup(
                *(self._config, run, self._whole.__enter__()),
                log_dir=self._folder.path,
                observer=self._observer,
            )
            self._group.start()
        except AgentrlError as error:
            self._error = error
        except Exception as error:
            _log.exception("the server's actor failed")
            self._error = EngineError(f"{self._name}: {type(error).__name__}: {error}")

    @property
    def _name(self) -> str:
        return self._run.servers[self._index].name

    async def find_endpoint(self, known: str | None) -> dict[str, Any]:
        """Where the server listens, or will; answers late if it is still at ``known``.

        Raises:
            AgentrlError: it cannot be started.
        """
        deadline = time.monotonic() + _ASK_SECONDS
        while True:
            if self._group is not None:
                endpoint = replace(self._group.endpoints[0], log_path=None)
                if endpoint.base_url != known or time.monotonic() > deadline:
                    return asdict(endpoint)
            elif self._error is not None:
                raise self._error
            await asyncio.sleep(_POLL_SECONDS)

    async def follow(self, incarnation: str, offset: int) -> dict[str, Any]:
        """What is new since ``offset`` of this incarnation's log."""
        if incarnation != self._incarnation:
            offset = 0
        path = self._folder.path / f"{self._name}.log"
        deadline = time.monotonic() + _NEWS_SECONDS
        while True:
            chunk = read_from(path, offset) if path.exists() else b""
            texts = self._observer.take()
            error = self._find_error()
            if chunk or texts or error or time.monotonic() > deadline:
                described = error and [type(error).__name__, str(error), error.exit_code]
                is_ready = self._group is not None and self._group.have_been_ready
                return {
                    "incarnation": self._incarnation,
                    "node": find_own_host(),
                    "offset": offset + len(chunk),
                    "chunk": chunk,
                    "texts": texts,
                    "error": described,
                    "is_ready": is_ready,
                }
            await asyncio.sleep(_POLL_SECONDS)

    def _find_error(self) -> AgentrlError | None:
        if self._error is not None or self._group is None:
            return self._error
        try:
            self._group.check()
        except AgentrlError as error:
            return error
        return None

    async def take_files(self, name: str, files: Mapping[str, Sequence[Any]]) -> str:
        """Writes files from the object store into the memory of this node; the folder."""
        folder = self._weights.path / name
        folder.mkdir(exist_ok=True)
        for file_name, parts in files.items():
            with (folder / file_name).open("wb") as file:
                for part in parts:
                    content = await part
                    await asyncio.to_thread(file.write, memoryview(content))
        self._kept = [path for path in self._kept if path != folder] + [folder]
        num_kept = _NUM_KEPT if self._config.model.lora is not None else 1
        while len(self._kept) > num_kept:
            shutil.rmtree(self._kept.pop(0), ignore_errors=True)
        return str(folder)

    async def stop(self) -> None:
        """Ends the server."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._starting.join(_STOP_SECONDS)
        if self._group is not None:
            self._group.stop()
            self._whole.__exit__(None, None, None)
        self._folder.close()
        self._weights.close()


class _Messages(SilentObserver):
    """Keeps messages until they are taken."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lock = threading.Lock()

    def on_message(self, text: str) -> None:
        with self._lock:
            self._texts.append(text)

    def take(self) -> list[str]:
        """Those since the last time."""
        with self._lock:
            texts, self._texts = self._texts, []
        return texts


class RemoteServers:
    """The engine servers of a run; see :class:`ServerGroup`. As a context manager it ends them.

    Args:
        config: the experiment.
        run: what it comes to on the cluster.
        options: of the actor of each server.
        log_dir: gets a copy of each server's log.
        observer: gets messages about them.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run: ResolvedRun,
        options: Sequence[Mapping[str, Any]],
        *,
        log_dir: Path,
        observer: Observer,
    ) -> None:
        self._config = config
        self._run = run
        self._log_dir = log_dir
        self._observer = observer
        self._error: AgentrlError | None = None
        self._ready: set[str] = set()
        self._is_stopping = threading.Event()
        given = config.model_dump_json(), run.model_dump_json()
        self._actors: list[Any] = [
            ray.remote(ServerActor)
            .options(
                **one,
                name=server.name,
                # Ray starts it again, elsewhere, as often as nodes are lost, and asks again what
                # it was asked.
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=100,
            )
            .remote(*given, index)
            for index, (server, one) in enumerate(zip(run.servers, options, strict=True))
        ]
        names = [server.name for server in run.servers]
        self._threads = [
            threading.Thread(target=self._follow, args=(name, actor), daemon=True)
            for name, actor in zip(names, self._actors, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def servers(self) -> RunningServers:
        """Where they listen, or will.

        Raises:
            AgentrlError: one cannot be started.
        """
        limit = self._config.launcher.placement_timeout_seconds
        asking = [actor.find_endpoint.remote(None) for actor in self._actors]
        try:
            found = ray.get(asking, timeout=limit)
        except GetTimeoutError:
            raise EngineTimeoutError(
                f"the cluster has not started the actors of all engine servers within {limit:g} s "
                "(launcher.placement_timeout_seconds)"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None  # type: ignore[no-untyped-call]
        except RayError as error:
            problem = "an engine server's actor could not be started"
            raise EngineError(f"{problem}: {describe_loss(error)}") from error
        return RunningServers(
            run=self._run, endpoints=tuple(ServerEndpoint(**endpoint) for endpoint in found)
        )

    def check(self) -> None:
        """Returns unless a server could not be started, or kept running.

        Raises:
            AgentrlError: why.
        """
        if self._error is not None:
            raise self._error

    def wait(self) -> RunningServers:
        """The servers, once they are ready. Raises as :meth:`check`."""
        while len(self._ready) < len(self._actors):
            self.check()
            time.sleep(_POLL_SECONDS)
        return self.servers

    def end_with_servers(self, engine: InferenceEngine) -> None:
        """Lets the engine's calls fail as soon as a server is given up."""
        if isinstance(engine, EngineRouter) and self._error is not None:
            engine.fail(self._error)

    def _follow(self, name: str, actor: Any) -> None:
        """Copies its log, forwards its messages, and notes that it has failed."""
        incarnation, offset = "", 0
        # A node that is lost is noticed after half a minute, and the start takes its time.
        launcher, engine = self._config.launcher, self._config.engine
        limit = launcher.placement_timeout_seconds + engine.start_timeout_seconds
        try:
            while not self._is_stopping.is_set():
                news = ray.get(actor.follow.remote(incarnation, offset), timeout=limit)
                if incarnation not in ("", news["incarnation"]):
                    self._observer.on_message(f"{name} is started again, on {news['node']}")
                incarnation, offset = news["incarnation"], news["offset"]
                with (self._log_dir / f"{name}.log").open("ab") as log:
                    log.write(news["chunk"])
                for text in news["texts"]:
                    self._observer.on_message(text)
                if news["is_ready"]:
                    self._ready.add(name)
                if news["error"] is not None:
                    raise build_error(*news["error"])
        except AgentrlError as error:
            self._fail(error)
        except GetTimeoutError:
            problem = f"was lost, and could not be started again elsewhere within {limit:g} s"
            self._fail(EngineTimeoutError(f"{name} {problem}"))
        except (RayError, OSError) as error:
            self._fail(EngineError(f"{name} was lost: {describe_loss(error)}"))

    def _fail(self, error: AgentrlError) -> None:
        if not self._is_stopping.is_set():
            self._error = self._error or error

    def stop(self) -> None:
        """Ends all servers."""
        self._is_stopping.set()
        stopping = [actor.stop.remote() for actor in self._actors]
        ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        for thread in self._threads:
            thread.join(_NEWS_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()
