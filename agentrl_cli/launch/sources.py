"""What answers the agent's calls in an evaluation: an engine here, or an endpoint elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import ConfigError, UserInputError
from agentrl_cli.launch.loading import load_engine
from agentrl_cli.launch.plan import check_supported, count_visible_gpus
from agentrl_cli.log import Observer
from agentrl_cli.models.loading import resolve_model_folder
from agentrl_cli.models.pretrained import load_tokenizer
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.endpoint import EndpointGateway
from agentrl_cli.tracking.gateway import get_gateway
from agentrl_cli.tracking.session import Budget

#: A remote endpoint refuses when it is busy; its calls are repeated, with growing pauses.
_NUM_ENDPOINT_RETRIES = 5


class CompletionSource(Protocol):
    """Where completions come from."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, for workflows that ask for it."""
        ...

    def prepare(self) -> None:
        """Loads what can turn out to be wrong with the input."""
        ...

    def start(self) -> InferenceEngine:
        """The engine to give to the workflow."""
        ...

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        """The client of one trajectory."""
        ...

    async def close(self) -> None:
        """Ends what was started."""
        ...


class EngineSource:
    """A model that agentrl runs itself."""

    def __init__(self, config: ExperimentConfig, model_path: str, observer: Observer) -> None:
        check_supported(config, num_gpus=count_visible_gpus())
        self._config = config
        self._model_path = model_path
        self._observer = observer
        self._engine: InferenceEngine | None = None

    @cached_property
    def model_folder(self) -> str:
        """The model's folder or hub id."""
        return resolve_model_folder(self._model_path, self._observer)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return load_tokenizer(self._config.tokenizer_path or self.model_folder)

    def prepare(self) -> None:
        """Makes the model if it is built in, and checks its tokenizer."""
        _ = self.tokenizer

    def start(self) -> InferenceEngine:
        """Loads the model."""
        self._engine = load_engine(self._config, self.model_folder, self.tokenizer)
        return self._engine

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        """A client on the engine's gateway."""
        return TrackingClient(
            engine=engine,
            tokenizer=self.tokenizer,
            tool_call_parser=self._config.engine.tool_call_parser,
            sampling=sampling,
            budget=budget,
        )

    async def close(self) -> None:
        """Ends the engine and its gateway."""
        if self._engine is not None:
            parser = self._config.engine.tool_call_parser
            await get_gateway(self._engine, self.tokenizer, parser).close()
            await self._engine.close()


@dataclass(frozen=True, slots=True)
class _EndpointModel:
    """All that a workflow of the configuration's agent asks of an engine: its name."""

    model_name: str


@dataclass(slots=True)
class EndpointSource:
    """A model behind an OpenAI-compatible endpoint; its key is read from ``OPENAI_API_KEY``."""

    config: ExperimentConfig
    base_url: str
    model_name: str
    _gateway: EndpointGateway | None = field(default=None, init=False)

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

    def start(self) -> InferenceEngine:
        """Opens the gateway to the endpoint."""
        self._gateway = EndpointGateway(
            self.base_url,
            os.environ.get("OPENAI_API_KEY") or "none",
            self.model_name,
            timeout_seconds=self.config.engine.generate_timeout_seconds,
            max_retries=_NUM_ENDPOINT_RETRIES,
        )
        # AgentRolloutWorkflow reads the engine's name and hands it to open_client.
        return cast("InferenceEngine", _EndpointModel(self.model_name))

    def open_client(
        self, engine: InferenceEngine, sampling: Sampling, budget: Budget
    ) -> TrackingClient:
        """A client on the gateway to the endpoint."""
        assert self._gateway is not None
        session = self._gateway.open_session(sampling=sampling, budget=budget)
        return TrackingClient(gateway=self._gateway, session=session)

    async def close(self) -> None:
        """Closes the gateway."""
        if self._gateway is not None:
            await self._gateway.close()
