"""What answers an agent's calls outside of training: an engine here, or an endpoint elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.engine.weights.weight_transfer import build_weight_transfer
from agentrl_cli.errors import ConfigError, UserInputError
from agentrl_cli.launch.placement import LocalPlacement, Placement, Servers
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.rollout_workers.rollout_pool import RolloutWorkers
from agentrl_cli.launch.run_models import load_embedded_engine
from agentrl_cli.launch.run_resolution import with_output_head, with_server_package
from agentrl_cli.launch.servers.server_group import open_router
from agentrl_cli.log import CheckStop, Observer, never_stop
from agentrl_cli.models.builtin_models import resolve_model_folder
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.store.checksums import check_checksums
from agentrl_cli.store.layout import describe, parse_label
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.endpoint import EndpointGateway
from agentrl_cli.tracking.formats.format_choice import describe_fallback
from agentrl_cli.tracking.formats.reply_formats import ReplyFormats
from agentrl_cli.tracking.gateway import get_gateway
from agentrl_cli.tracking.session import Budget
from agentrl_cli.tracking.template import PLAIN_CONVERSATION, ChatTemplate

#: A remote endpoint refuses when it is busy; its calls are repeated, with growing pauses.
_NUM_ENDPOINT_RETRIES = 5
_CLOSE_SECONDS = 20.0
#: What a router may take longer than the servers' start before nobody waits for it.
_GRACE_SECONDS = 30.0


class EngineSource:
    """A model that agentrl runs itself.

    Args:
        config: the experiment.
        run: what it comes to on this machine.
        observer: is told what is started.
        checkpoint: a checkpoint's folder, instead of ``model.path``.
        servers: engine servers that run already; None: they are started here, where
            ``engine.kind`` needs any.
        placement: where processes are; None: on this machine.
        check_stop: what it raises ends the making of a built-in model.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run: ResolvedRun,
        observer: Observer,
        checkpoint: Path | None = None,
        *,
        servers: RunningServers | None = None,
        placement: Placement | None = None,
        check_stop: CheckStop = never_stop,
    ) -> None:
        self.run = run
        self.label = "model"
        if checkpoint is not None:
            check_checksums(checkpoint)
            self.label = f"checkpoint-{parse_label(checkpoint.name)}"
        self._config = config
        self._model_path = str(checkpoint or config.model.path)
        self._observer = observer
        self._servers = servers
        self._check_stop = check_stop
        self._placement = placement or LocalPlacement()
        self._server_group: Servers | None = None
        self.workers: RolloutWorkers | None = None
        """Run the trajectories, if they are started before the engine is opened."""

    def check(self) -> None:
        """Returns while the servers, if any were started here, can be kept running.

        Raises:
            AgentrlError: they died too often.
        """
        if self._server_group is not None:
            self._server_group.check()

    @cached_property
    def model_folder(self) -> str:
        """The model's folder or hub id; a built-in model is made on its first use."""
        return resolve_model_folder(self._model_path, self._observer, self._check_stop)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; whoever watches is told if its calls are read by a guess."""
        from agentrl_cli.models.model_files import load_tokenizer_of

        config = self._config
        tokenizer = load_tokenizer_of(
            self.model_folder, config.tokenizer_path, config.model.chat_template
        )
        fallback = describe_fallback(tokenizer, config.engine.tool_call_parser)
        if fallback is not None:
            self._observer.on_message(fallback)
        return tokenizer

    def prepare(self) -> None:
        """Looks for what servers run on, makes a built-in model, and checks its files and its
        tokenizer."""
        from agentrl_cli.models.model_files import check_model_files

        if self._servers is None and not self.run.on_cluster:
            self.run = with_server_package(self.run, self._config)
        ChatTemplate(self.tokenizer, ReplyFormats()).check_shown(PLAIN_CONVERSATION)
        check_model_files(self.model_folder)

    def start_servers(self, log_dir: Path, stack: ExitStack) -> RunningServers:
        """Where the servers are; begins to start those that nobody else has."""
        if self._servers is not None:
            return self._servers
        self._servers = RunningServers(run=self.run)
        if self.run.servers:
            from agentrl_cli.models.model_files import open_whole_model

            if self.run.purpose != "train":
                from agentrl_cli.models.pretrained import check_weight_files

                # A trainer loads the weights too, and so looks at them itself.
                check_weight_files(self.model_folder)
            run = with_output_head(self.run, self._config, self.model_folder)
            # Servers load no folder that holds an adapter alone.
            whole_model = open_whole_model(self.model_folder, self._config.model.dtype)
            self._server_group = self._placement.start_servers(
                *(self._config, run, stack.enter_context(whole_model), stack),
                log_dir=log_dir,
                observer=self._observer,
            )
            names = [server.name for server in run.servers]
            which = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            self._observer.on_message(f"starting {which} (logs: {describe(log_dir)})")
            self._servers = self._server_group.servers
        return self._servers

    def start_workers(self, log_dir: Path, background: BackgroundLoop, stack: ExitStack) -> None:
        """Begins to start the rollout workers, where there are to be any; at once."""
        if self.workers is not None:
            servers = self.start_servers(log_dir, stack)
            stack.callback(self.workers.close)
            self.workers.start(
                *(background, servers, self.model_folder, self.tokenizer, log_dir),
                placement=self._placement,
            )

    def open_engine(
        self,
        log_dir: Path,
        background: BackgroundLoop,
        stack: ExitStack,
        *,
        version: int | None = 0,
        tied_names: Mapping[str, str] | None = None,
    ) -> InferenceEngine:
        """An engine that is ready for calls: here, or on servers.

        Args:
            log_dir: gets the logs of servers that are started here.
            background: the loop on which the engine is used.
            stack: closes it.
            version: what the servers' weights are called; None: the first publication will say.
            tied_names: of :func:`find_tied_names`, for servers that will get weights.

        Raises:
            ModelError: the model cannot be loaded.
            EngineError: no server became ready in time.
        """
        servers = self.start_servers(log_dir, stack)
        if self._server_group is not None:
            self._server_group.wait()
        engine: InferenceEngine
        if servers.run.servers:
            transfer = build_weight_transfer(
                self._config,
                model_folder=self.model_folder,
                kind=servers.run.weight_transfer,
                tied_names=tied_names if tied_names and servers.run.untied_head else {},
                on_message=self._observer.on_message,
                deliver=self._placement.deliver,
            )
            follow = self._placement.follow_servers
            opening = open_router(self._config, servers, transfer, version, follow)
            limit = self._config.engine.start_timeout_seconds + _GRACE_SECONDS
            engine = router = background.run(opening, limit)
            if self.workers is not None:
                self.workers.attach(router)
        else:
            engine = load_embedded_engine(self._config, self.run, self.model_folder, self.tokenizer)
        if self._server_group is not None:
            self._server_group.end_with_servers(engine)
        stack.callback(lambda: background.run(engine.close(), _CLOSE_SECONDS))
        gateway = get_gateway(engine, self.tokenizer, **self._config.engine.list_reading_options())
        stack.callback(lambda: background.run(gateway.close(), _CLOSE_SECONDS))
        return engine

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        """A client on the engine's gateway."""
        return TrackingClient(
            engine=engine,
            tokenizer=self.tokenizer,
            sampling=sampling,
            budget=budget,
            **self._config.engine.list_reading_options(),
        )


@dataclass(frozen=True, slots=True)
class _EndpointModel:
    """All that rollouts of the configuration's agent need of an engine: its name and its load."""

    model_name: str

    async def read_load(self) -> None:
        """Nobody knows: the number of trajectories stays at its maximum."""


@dataclass(slots=True)
class EndpointSource:
    """A model behind an OpenAI-compatible endpoint; its key is read from ``OPENAI_API_KEY``."""

    config: ExperimentConfig
    base_url: str
    model_name: str
    _gateway: EndpointGateway | None = field(default=None, init=False)

    @property
    def label(self) -> str:
        """A part of file names."""
        return f"endpoint-{parse_label(self.model_name)}"

    @property
    def tokenizer(self) -> Any:
        """There is none.

        Raises:
            UserInputError: always.
        """
        raise UserInputError(
            "--base-url evaluates an agent (agent_builder_path); a workflow of your own "
            "(workflow_path) needs tokens, which endpoints do not give. Evaluate it without "
            "--base-url, with model.path=FOLDER_OR_HUB_ID"
        )

    def prepare(self) -> None:
        """Looks for the key; local endpoints need none."""
        local = any(name in self.base_url for name in ("127.0.0.1", "localhost", "[::1]"))
        if not os.environ.get("OPENAI_API_KEY") and not local:
            raise ConfigError(
                f"--base-url {self.base_url}: OPENAI_API_KEY is not set, and the endpoint will "
                "ask for a key. Type: export OPENAI_API_KEY=... (any text where none is needed)"
            )

    def open_engine(
        self, log_dir: Path, background: BackgroundLoop, stack: ExitStack
    ) -> InferenceEngine:
        """Opens the gateway to the endpoint."""
        gateway = EndpointGateway(
            self.base_url,
            os.environ.get("OPENAI_API_KEY") or "none",
            self.model_name,
            timeout_seconds=self.config.engine.generate_timeout_seconds,
            max_retries=_NUM_ENDPOINT_RETRIES,
        )
        self._gateway = gateway
        stack.callback(lambda: background.run(gateway.close(), _CLOSE_SECONDS))
        # AgentRolloutWorkflow reads the engine's name and hands it to open_client.
        return cast("InferenceEngine", _EndpointModel(self.model_name))

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        """A client on the gateway to the endpoint."""
        assert self._gateway is not None
        session = self._gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=self._gateway, session=session)


#: What answers the agent's calls.
CompletionSource = EngineSource | EndpointSource
