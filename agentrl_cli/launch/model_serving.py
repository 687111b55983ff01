"""A model behind the gateway without training: to try an agent by hand, or to record programs."""

from __future__ import annotations

import itertools
import json
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.errors import RunError
from agentrl_cli.evaluate.eval_report import build_report
from agentrl_cli.launch.completion_sources import EngineSource
from agentrl_cli.launch.run_resolution import resolve_run_here
from agentrl_cli.launch.trainer import take_rows
from agentrl_cli.log import Observer, file_log, format_count
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import Row, TaskStream
from agentrl_cli.rollout.external.external_workflow import ExternalListener
from agentrl_cli.rollout.trajectory_pool import TrajectoryPool
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.rollout.workflow_building import build_workflow
from agentrl_cli.store.layout import describe
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.gateway import get_gateway
from agentrl_cli.tracking.gateway_socket import LOOPBACK, check_binding, open_listener

#: Calls that the one session of a served model remembers, to continue them token by token; then
#: it forgets them all, so that it can serve for ever.
_MAX_KEPT = 512
_OPEN_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 60.0
#: Trajectories in one file: it is rewritten with each.
_NUM_PER_FILE = 32


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where to listen, as far as the user said so. Addresses that other machines reach need a
    key."""

    port: int | None = None
    host: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers."""

    text: str = field(repr=False)
    """What a person types to use it, the key included unless the user gave it."""
    check: Callable[[], None]
    """Raises AgentrlError once it cannot continue."""


@contextmanager
def serve_model(
    config: ExperimentConfig,
    *,
    observer: Observer,
    address: ListenAddress,
    checkpoint: Path | None = None,
) -> Iterator[ServedModel]:
    """Serves the configuration's model inside the block, without a run, to try an agent by hand.

    Calls are sampled as ``gconfig`` says where a request does not say otherwise. A ``checkpoint``
    takes the place of ``model.path``.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: the engine did not start.
    """
    host, port = address.host or LOOPBACK, address.port or 0
    check_binding(host, address.api_key, "--host")
    source = EngineSource(config, resolve_run_here(config, "eval"), observer, checkpoint)
    source.prepare()
    # Reported before servers are started for minutes.
    open_listener(port, host).close()
    with ExitStack() as stack:
        folder, background, engine = _start_engine(config, source, observer, stack)
        gateway = get_gateway(engine, source.tokenizer, **config.engine.list_reading_options())
        base_url = background.run(gateway.serve(port, host), _OPEN_SECONDS)
        gconfig = config.gconfig
        session = gateway.open_session(
            sampling=Sampling(
                max_tokens=gconfig.max_tokens,
                temperature=gconfig.temperature,
                top_p=gconfig.top_p,
            ),
            key=address.api_key,
            max_kept=_MAX_KEPT,
        )
        # A key that the user gave need not be shown.
        key = session.key if address.api_key is None else "$AGENTRL_API_KEY"
        text = _format_usage(gateway.model_name, base_url, key, folder.log_dir("serve"))
        yield ServedModel(text, source.check)


def _start_engine(
    config: ExperimentConfig, source: EngineSource, observer: Observer, stack: ExitStack
) -> tuple[RunFolder, BackgroundLoop, InferenceEngine]:
    folder = stack.enter_context(RunFolder.for_evaluation(config))
    stack.enter_context(file_log(folder.log_path("serve")))
    background = stack.enter_context(BackgroundLoop())
    observer.on_stage("load model")
    return folder, background, source.open_engine(folder.log_dir("serve"), background, stack)


def _format_usage(model_name: str, base_url: str, key: str, log_dir: Path) -> str:
    quote = '"' if key.startswith("$") else "'"
    request = json.dumps(
        {"model": model_name, "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    )
    return (
        f"{model_name} is served (Ctrl-C ends it; logs: {describe(log_dir)}). For an agent:\n\n"
        f"  export OPENAI_BASE_URL={base_url}\n"
        f"  export OPENAI_API_KEY={key}\n"
        f"  model name: {model_name}\n\n"
        f"By hand:\n\n"
        f"  curl {base_url}/chat/completions \\\n"
        f"    -H {quote}Authorization: Bearer {key}{quote} \\\n"
        f"    -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(request)}\n"
    )


class OnlineRecorder:
    """Stores trajectories as they end, a few to a file, beside the evaluations of a run folder."""

    def __init__(self, folder: RunFolder, on_finished: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_finished = on_finished
        self._name = folder.claim_eval(0, f"online-{time.strftime('%Y%m%dT%H%M%S')}")
        self._file_number = 1
        self._trajectories: list[Trajectory] = []

    def add(self, trajectory: Trajectory) -> None:
        """Stores one more; what it is stored in is complete after every call."""
        self._trajectories.append(trajectory)
        report = build_report(self._trajectories, k_values=(1,))
        label = f"{self._name}-{self._file_number:04d}"
        path = self._folder.write_eval(0, self._trajectories, report.to_dict(), label=label)
        self._on_finished(_describe(trajectory, path))
        if len(self._trajectories) >= _NUM_PER_FILE:
            self._trajectories = []
            self._file_number += 1


@contextmanager
def serve_online(
    config: ExperimentConfig,
    *,
    observer: Observer,
    on_finished: Callable[[str], None],
    address: ListenAddress,
    checkpoint: Path | None = None,
) -> Iterator[ServedModel]:
    """Gives out the training tasks, or programs' own, inside the block, and stores what comes.

    The configuration's agent, if it names one, is not run.

    Args:
        config: the experiment.
        observer: is told what is started.
        on_finished: gets a line about every trajectory.
        address: what is left out of it is as ``rollout.external`` says, the key that in
            AGENTRL_API_KEY, or else a random one.
        checkpoint: a checkpoint's folder, instead of ``model.path``.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: the engine did not start.
    """
    if address.host is not None:
        check_binding(address.host, address.api_key, "--host")
    config = _listen_at(config, address)
    rows = take_rows(None, config.train_dataset, "train_dataset")
    shown: list[str] = []
    access = ExternalListener(config.rollout, shown.append, waits="ever", key=address.api_key)
    source = EngineSource(config, resolve_run_here(config, "eval"), observer, checkpoint)
    with ExitStack() as stack:
        workflow = build_workflow(config, None, open_client=source.open_client, external=access)
        stack.callback(workflow.close)
        workflow.check_rows(rows, "train_dataset")
        source.prepare()
        folder, background, engine = _start_engine(config, source, observer, stack)
        recorder = OnlineRecorder(folder, on_finished)
        pool = TrajectoryPool(
            workflow, engine, recorder.add, max_concurrent=config.rollout.max_concurrent
        )
        stack.callback(lambda: background.run(pool.close(), _CLOSE_SECONDS))
        feeder = background.submit(_feed(pool, config, rows))
        stack.callback(feeder.cancel)

        def check() -> None:
            if pool.error is not None:
                raise pool.error
            source.check()

        _wait_for_listener(access, check)
        text = (
            f"{engine.model_name} is served (Ctrl-C ends it; logs: "
            f"{describe(folder.log_dir('serve'))}; "
            f"trajectories: agentrl inspect-trajectories {folder.location} --evals all), and "
            f"{shown[0]}"
        )
        yield ServedModel(text, check)


async def _feed(pool: TrajectoryPool, config: ExperimentConfig, rows: Sequence[Row]) -> None:
    """Offers every task again and again, as many at once as may be in progress."""
    dataset = config.train_dataset
    stream = TaskStream(
        rows, batch_size=dataset.batch_size, shuffle=dataset.shuffle, seed=config.seed
    )
    try:
        for step in itertools.count(1):
            for task in stream.batch(step):
                for index in range(config.gconfig.n_samples):
                    await pool.start(Attempt(task=task, sample_index=index))
                    if pool.error is not None:
                        return
    except Exception as error:
        pool.fail(error)


def _wait_for_listener(access: ExternalListener, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + _OPEN_SECONDS
    while not access.is_open:
        check()
        if time.monotonic() > deadline:
            raise RunError(f"the listener for programs did not open within {_OPEN_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _listen_at(config: ExperimentConfig, address: ListenAddress) -> ExperimentConfig:
    """The configuration, with ``rollout.external`` as far as the address says otherwise."""
    given = {"host": address.host, "port": address.port}
    changes = {name: value for name, value in given.items() if value is not None}
    external = config.rollout.external.model_copy(update=changes)
    rollout = config.rollout.model_copy(update={"external": external})
    return config.model_copy(update={"rollout": rollout})


def _describe(trajectory: Trajectory, path: Path) -> str:
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3f}"
    failure = f"  failed ({trajectory.failure.boundary})" if trajectory.failure else ""
    turns = format_count(trajectory.num_turns, "turn")
    return f"{trajectory.id}  {reward}  {turns}{failure}  {path.with_suffix('.parquet').name}"
