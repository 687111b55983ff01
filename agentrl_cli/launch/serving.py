"""A model behind the gateway without a run, for trying an agent by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import Sampling
from agentrl_cli.launch.sources import EngineSource
from agentrl_cli.log import Observer, file_log
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.gateway import get_gateway
from agentrl_cli.tracking.server import open_listener

_OPEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Where a model answers, in the words of an OpenAI client."""

    base_url: str
    api_key: str = field(repr=False)
    model_name: str
    log_dir: Path
    """Has the logs of what serves it."""


@contextmanager
def serve_model(
    config: ExperimentConfig, *, port: int | None, observer: Observer
) -> Iterator[ServedModel]:
    """Serves the configuration's model on loopback inside the block.

    Calls are sampled as ``gconfig`` says where a request does not say otherwise.

    Args:
        config: the experiment.
        port: of the gateway; None: one that is free.
        observer: is told what is started.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: the engine did not start.
    """
    source = EngineSource(config, config.model.path, observer)
    source.prepare()
    # Said before servers are started for minutes.
    open_listener(port or 0).close()
    folder = RunFolder.for_evaluation(config)
    with ExitStack() as stack:
        stack.enter_context(file_log(folder.log_path("serve")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        engine = source.start(background, folder.log_dir("serve"), stack)
        gateway = get_gateway(engine, source.tokenizer, **config.engine.list_reading_options())
        base_url = background.run(gateway.serve(port or 0), _OPEN_SECONDS)
        gconfig = config.gconfig
        session = gateway.open_session(
            sampling=Sampling(
                max_tokens=gconfig.max_tokens,
                temperature=gconfig.temperature,
                top_p=gconfig.top_p,
            )
        )
        yield ServedModel(base_url, session.key, gateway.model_name, folder.log_dir("serve"))
