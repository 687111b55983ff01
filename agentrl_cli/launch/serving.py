"""A model behind the gateway without a run, for trying an agent by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from agentrl_cli.tracking.server import LOOPBACK, check_binding, open_listener

#: Calls that the one session of a served model remembers, to continue them token by token; then
#: it forgets them all, so that it can serve for ever.
_MAX_KEPT = 512
_OPEN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Where a model answers, in the words of an OpenAI client."""

    base_url: str
    api_key: str = field(repr=False)
    model_name: str
    log_dir: Path
    """Has the logs of what serves it."""
    check: Callable[[], None] = field(repr=False)
    """Raises AgentrlError once its servers have died too often."""
    is_own_key: bool = True
    """False: the key is one that the user gave, and need not be shown."""


@contextmanager
def serve_model(
    config: ExperimentConfig,
    *,
    observer: Observer,
    port: int | None = None,
    host: str | None = None,
    api_key: str | None = None,
) -> Iterator[ServedModel]:
    """Serves the configuration's model inside the block.

    Calls are sampled as ``gconfig`` says where a request does not say otherwise.

    Args:
        config: the experiment.
        observer: is told what is started.
        port: of the gateway; None: one that is free.
        host: its address, 127.0.0.1 for None; others than this machine's own need a key.
        api_key: opens it; None: a random one.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: the engine did not start.
    """
    host = host or LOOPBACK
    check_binding(host, api_key, "--host")
    source = EngineSource(config, config.model.path, observer)
    source.prepare()
    # Said before servers are started for minutes.
    open_listener(port or 0, host).close()
    folder = RunFolder.for_evaluation(config)
    with ExitStack() as stack:
        stack.enter_context(file_log(folder.log_path("serve")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        engine = source.start(background, folder.log_dir("serve"), stack)
        gateway = get_gateway(engine, source.tokenizer, **config.engine.list_reading_options())
        base_url = background.run(gateway.serve(port or 0, host), _OPEN_SECONDS)
        gconfig = config.gconfig
        session = gateway.open_session(
            sampling=Sampling(
                max_tokens=gconfig.max_tokens,
                temperature=gconfig.temperature,
                top_p=gconfig.top_p,
            ),
            key=api_key,
            max_kept=_MAX_KEPT,
        )
        yield ServedModel(
            base_url,
            session.key,
            gateway.model_name,
            folder.log_dir("serve"),
            check=source.check,
            is_own_key=api_key is None,
        )
