"""A model behind the gateway that records programs elsewhere, without training."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.errors import RunError
from agentrl_cli.evaluate.report import build_report
from agentrl_cli.launch.sources import EngineSource
from agentrl_cli.launch.trainer import take_rows
from agentrl_cli.log import Observer, file_log
from agentrl_cli.records import Trajectory
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.rollout.building import ExternalAccess, build_workflow, open_external_access
from agentrl_cli.rollout.dataset import Row, TaskStream
from agentrl_cli.rollout.pool import TrajectoryPool
from agentrl_cli.rollout.workflow import Attempt
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.server import check_binding

_OPEN_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 60.0
#: Trajectories in one file: it is written anew with each.
_NUM_PER_FILE = 32


@dataclass(frozen=True, slots=True)
class OnlineService:
    """Sessions for programs elsewhere."""

    text: str = field(repr=False)
    """What a person types to use it, the key included."""
    check: Callable[[], None]
    """Raises AgentrlError when it cannot go on."""


class OnlineRecorder:
    """Stores trajectories as they end, a few to a file, beside the evaluations of a run folder."""

    def __init__(self, folder: RunFolder, on_finished: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_finished = on_finished
        self._name = f"online-{time.strftime('%Y%m%dT%H%M%S')}"
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
    port: int | None = None,
    host: str | None = None,
    api_key: str | None = None,
) -> Iterator[OnlineService]:
    """Gives out the training tasks, or programs' own, inside the block, and stores what comes.

    Args:
        config: the experiment; its agent, if it names one, is not run.
        observer: is told what is started.
        on_finished: is told of every trajectory, in a line.
        port: to listen at; None: ``rollout.external.port``.
        host: the address; None: ``rollout.external.host``. Others than this machine's own need a
            key.
        api_key: the admin key; None: that in AGENTRL_API_KEY, else a random one.

    Raises:
        UserInputError: something in the input is wrong.
        RunError: the engine did not start.
    """
    if host is not None:
        check_binding(host, api_key, "--host")
    config = _listen_at(config, host, port)
    rows = take_rows(None, config.train_dataset, "train_dataset")
    shown: list[str] = []
    access = open_external_access(config, shown.append, waits="ever", key=api_key)
    source = EngineSource(config, config.model.path, observer)
    with ExitStack() as stack:
        workflow = build_workflow(
            config, None, open_client=source.open_client, seed=config.seed, external=access
        )
        stack.callback(workflow.close)
        workflow.check_rows(rows, "train_dataset")
        source.prepare()
        folder = RunFolder.for_evaluation(config)
        stack.enter_context(file_log(folder.log_path("serve")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        engine = source.start(background, folder.log_dir("serve"), stack)
        recorder = OnlineRecorder(folder, on_finished)
        pool = TrajectoryPool(workflow, engine, config.rollout.max_concurrent, recorder.add)
        stack.callback(lambda: background.run(pool.close(), _CLOSE_SECONDS))
        feeder = background.submit(_feed(pool, config, rows))
        stack.callback(feeder.cancel)

        def check() -> None:
            if pool.error is not None:
                raise pool.error
            source.check()

        _wait_for_door(access, check)
        yield OnlineService(_format_text(engine.model_name, folder, shown[0]), check)


def _format_text(model_name: str, folder: RunFolder, door: str) -> str:
    return (
        f"{model_name} is served (Ctrl-C ends it; logs: {folder.log_dir('serve')}; "
        f"trajectories: agentrl inspect-trajectories {folder.path} --evals), and {door}"
    )


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


def _wait_for_door(access: ExternalAccess, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + _OPEN_SECONDS
    while not access.door.is_open:
        check()
        if time.monotonic() > deadline:
            raise RunError(f"the door for programs did not open within {_OPEN_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def _listen_at(config: ExperimentConfig, host: str | None, port: int | None) -> ExperimentConfig:
    external = config.rollout.external
    changes = {
        "host": external.host if host is None else host,
        "port": external.port if port is None else port,
    }
    rollout = config.rollout.model_copy(update={"external": external.model_copy(update=changes)})
    return config.model_copy(update={"rollout": rollout})


def _describe(trajectory: Trajectory, path: Path) -> str:
    reward = "no reward" if trajectory.reward is None else f"reward {trajectory.reward:.3f}"
    failure = f"  failed ({trajectory.failure.boundary})" if trajectory.failure else ""
    turns = f"{trajectory.num_turns} turns"
    return f"{trajectory.id}  {reward}  {turns}{failure}  {path.with_suffix('.parquet').name}"
