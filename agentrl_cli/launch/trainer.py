"""``PPOTrainer``: a configuration, datasets and a workflow become a finished run."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl_cli.config.experiment import DatasetConfig, ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.protocol import InferenceEngine
from agentrl_cli.errors import ConfigError, DatasetError, RunFolderError, StoppedError
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.evaluate.eval_run import evaluate
from agentrl_cli.launch.completion_sources import CompletionSource, EngineSource
from agentrl_cli.launch.placement import LocalPlacement, Placement
from agentrl_cli.launch.processes.trainer_protocol import RunningServers, TrainerSpec
from agentrl_cli.launch.rollout_workers.rollout_pool import RemoteWorkflow, RolloutWorkers
from agentrl_cli.launch.run_models import find_tied_names, find_unseen_models, load_learner
from agentrl_cli.launch.run_resolution import resolve_run_here
from agentrl_cli.log import Observer, SilentObserver, file_log
from agentrl_cli.rollout.background_loop import BackgroundLoop, frozen_heap
from agentrl_cli.rollout.dataset import (
    Row,
    build_eval_tasks,
    build_task_stream,
    load_rows,
    recall_outcomes,
)
from agentrl_cli.rollout.external.external_workflow import ExternalListener
from agentrl_cli.rollout.scheduler import RolloutScheduler
from agentrl_cli.rollout.step_planner import StepPlanner
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflows, open_workers
from agentrl_cli.store.layout import describe, eval_name, is_url
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.store.working_copy import FolderOwner, open_location
from agentrl_cli.tracking.formats.format_choice import collect_template_text
from agentrl_cli.train.monitor.loggers.logger_building import (
    build_loggers,
    check_loggers,
    check_packages,
)
from agentrl_cli.train.rendezvous import Rendezvous
from agentrl_cli.train.resume import (
    CheckpointSaver,
    find_first_rolled_step,
    open_cursor,
    read_open_rounds,
    read_unused,
)

if TYPE_CHECKING:
    from agentrl_cli.train.learner import Learner
    from agentrl_cli.train.loop import StopFlag
    from agentrl_cli.train.ranks import Ranks

_CLOSE_SECONDS = 20.0


class PPOTrainer:
    """Trains the configuration's model; a context manager that holds the run folder.

        with PPOTrainer(config, train_dataset=rows) as trainer:
            trainer.train(workflow)

    Everything that can be wrong with the input is checked when it is made, before a model
    is loaded or a file is written.

    Args:
        config: the experiment.
        train_dataset: rows; None: those of ``config.train_dataset``.
        valid_dataset: rows; None: those of ``config.valid_dataset``, if it is set.
        observer: shows the run to a person.
        stop: asks the run to end after the step in progress.
        overwrite: discards what an earlier run left in the folder.
        servers: engine servers that run already; None: they are started here, where
            ``engine.kind`` needs any.
        run: what the configuration comes to on this machine; None: that of ``servers``, else it
            is found out here.
        owner: the process that holds the run folder for this one; None: this one will.
        rendezvous: with the processes that train together, of which this is rank 0; None: it
            trains alone.
        placement: where the processes of the run are; None: on this machine.

    Raises:
        UserInputError: the configuration or a dataset cannot be used.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        train_dataset: Sequence[Row] | None = None,
        valid_dataset: Sequence[Row] | None = None,
        observer: Observer | None = None,
        stop: StopFlag | None = None,
        overwrite: bool = False,
        servers: RunningServers | None = None,
        run: ResolvedRun | None = None,
        owner: FolderOwner | None = None,
        rendezvous: Rendezvous | None = None,
        placement: Placement | None = None,
    ) -> None:
        config.check_trainable()
        if run is None:
            run = servers.run if servers is not None else resolve_run_here(config, "train")
        RunFolder.check_resumable(config, overwrite=overwrite)
        # A trainer that is started again in the middle of a run waits for no logger.
        (check_loggers if owner is None else check_packages)(config)
        self.config = config
        self.observer = observer or SilentObserver()
        self.placement = placement or LocalPlacement()
        self.source = EngineSource(
            *(config, run, self.observer),
            servers=servers,
            placement=self.placement,
            check_stop=self._check_stop,
        )
        self._stop = stop or threading.Event()
        self._overwrite = overwrite
        self._owner = owner
        self._rendezvous = rendezvous
        self._train_rows = take_rows(train_dataset, config.train_dataset, "train_dataset")
        self._valid_rows = (
            take_rows(valid_dataset, config.valid_dataset, "valid_dataset")
            if valid_dataset is not None or config.valid_dataset is not None
            else None
        )
        find_unseen_models(config)
        self._stack = ExitStack()
        self._folder: RunFolder | None = None

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise StoppedError("the run was asked to stop before its first step")

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.source.tokenizer

    def __enter__(self) -> Self:
        # The last that can be wrong with the input, before anything is written.
        self.source.prepare()
        with ExitStack() as stack:
            if self._owner is None:
                folder = RunFolder.create_or_resume(
                    self.config, overwrite=self._overwrite, versions=self.source.run.versions
                )
            else:
                folder = RunFolder.join(self._owner)
            self._folder = stack.enter_context(folder)
            # On another machine only what is printed reaches the run folder in time.
            is_here = self.placement.cluster is None
            log_path = folder.log_path("trainer") if is_here else Path("/dev/stderr")
            stack.enter_context(file_log(log_path))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def run_dir(self) -> Path:
        """The run folder; of one on object storage, the working copy."""
        return self._entered().path

    def check_rows(self, workflow: RolloutWorkflow, eval_workflow: RolloutWorkflow) -> None:
        """Refuses datasets that the workflows cannot run on.

        Raises:
            UserInputError: naming the dataset, the row and the field.
        """
        workflow.check_rows(self._train_rows, "train_dataset")
        if self._valid_rows is not None:
            eval_workflow.check_rows(self._valid_rows, "valid_dataset")

    def report_if_complete(self, folder: RunFolder) -> bool:
        """True when the last step of the run in ``folder`` is done, which is then reported."""
        latest = folder.latest_checkpoint()
        if latest is None or latest[0] < self.config.train.total_steps:
            return False
        self.observer.on_message(
            f"{folder.location} is complete: {latest[0]} steps. For more, type train.total_steps="
            f"{2 * latest[0]}; to begin again, --overwrite or another trial_name="
        )
        return True

    def train(
        self, workflow: RolloutWorkflow, eval_workflow: RolloutWorkflow | None = None
    ) -> bool:
        """Trains to the last step; resumes where an interrupted run of the folder stopped.

        Args:
            workflow: makes the trajectories that are trained on.
            eval_workflow: makes those of evaluations; None: ``workflow``.

        Returns:
            True when the last step is done, False when asked to stop before it.

        Raises:
            UserInputError: a dataset that a workflow cannot run on.
            RunError: the run cannot continue; what was done is stored.
        """
        self._check_alone()
        folder, eval_workflow = self._entered(), eval_workflow or workflow
        if self.report_if_complete(folder):
            return True
        for one, gconfig in (
            (eval_workflow, self.config.resolve_eval_gconfig()),
            (workflow, self.config.gconfig),
        ):
            one.use(self.config.rollout, gconfig)
            one.log_to(folder.log_dir())
        self.check_rows(workflow, eval_workflow)
        with ExitStack() as stack:
            return self._run_loop(folder, workflow, eval_workflow, stack)

    def _run_loop(
        self,
        folder: RunFolder,
        workflow: RolloutWorkflow,
        eval_workflow: RolloutWorkflow,
        stack: ExitStack,
    ) -> bool:
        template = collect_template_text(self.tokenizer.chat_template)
        cursor = open_cursor(folder, self._train_rows, template)
        self.observer.on_stage("load model")
        background = stack.enter_context(BackgroundLoop())
        # They start while torch and the learner are loaded.
        self.source.start_servers(folder.log_dir(), stack)
        self.source.start_workers(folder.log_dir(), background, stack)
        from agentrl_cli.train.checkpoint import seed_generators
        from agentrl_cli.train.loop import RunCoordinator, TrainingLoop
        from agentrl_cli.train.publish import build_probes
        from agentrl_cli.train.ranks import open_ranks

        # Here and not when a checkpoint is loaded: critics and adapters begin with random weights.
        seed_generators(self.config.seed)
        ranks = stack.enter_context(
            open_ranks(self._rendezvous, on_gpu=self.source.run.trains_on_gpu)
        )
        learner = self._load_learner(ranks, folder)
        engine = self.source.open_engine(
            folder.log_dir(),
            background,
            stack,
            version=None,
            tied_names=find_tied_names(learner.model),
        )
        loggers = build_loggers(self.config, folder, stack, self.observer.on_message)
        first_step = find_first_rolled_step(folder, learner.step + 1)
        scheduler = self._build_scheduler(folder, workflow, engine, first_step)
        scheduler.set_policy_version(learner.step)
        stack.callback(lambda: background.run(scheduler.close(), _CLOSE_SECONDS))
        coordinator = RunCoordinator(
            config=self.config,
            folder=folder,
            learner=learner,
            saver=CheckpointSaver(self.config.train, folder, learner, cursor),
            engine=engine,
            scheduler=scheduler,
            first_rolled_step=first_step,
            background=background,
            probes=build_probes(self.tokenizer, self.config.engine.max_model_len),
            evaluate=partial(self._evaluate, eval_workflow, engine, background, folder),
            observer=self.observer,
            loggers=loggers,
            stop=self._stop,
        )
        with frozen_heap():
            return TrainingLoop(
                config=self.config, learner=learner, ranks=ranks, coordinator=coordinator
            ).run()

    def _evaluate(
        self,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        background: BackgroundLoop,
        folder: RunFolder,
        step: int,
    ) -> dict[str, float]:
        return evaluate_rows(
            self.config,
            self._valid_rows or [],
            workflow,
            engine,
            background,
            folder,
            self.observer,
            step=step,
        ).list_metrics()

    def _check_alone(self) -> None:
        num_processes = self.config.train.num_processes or 1
        is_placed = self.placement.cluster is not None or self._rendezvous is not None
        if self.config.launcher.kind != "local" and not is_placed:
            raise ConfigError(
                f"launcher.kind: {self.config.launcher.kind} is for the command agentrl train; a "
                "PPOTrainer in a program of your own trains on its machine. Type launcher.kind="
                "local, or name the workflow in the YAML (workflow_path) and type agentrl train "
                "--config FILE"
            )
        if self._rendezvous is None and num_processes > 1:
            raise ConfigError(
                f"train.num_processes: {num_processes} processes are started by the command "
                "agentrl train; a PPOTrainer in a program of your own trains in that program "
                "alone. Type train.num_processes=1, or name the workflow in the YAML "
                "(workflow_path) and type agentrl train --config FILE"
            )

    def _load_learner(self, ranks: Ranks, folder: RunFolder) -> Learner:
        learner = load_learner(
            self.config,
            self.source.run,
            self.source.model_folder,
            self.tokenizer,
            ranks=ranks,
            folder=folder,
        )
        latest = folder.latest_checkpoint()
        if latest is not None:
            self.observer.on_message(f"resuming after step {latest[0]}, from {describe(latest[1])}")
        return learner

    def _build_scheduler(
        self,
        folder: RunFolder,
        workflow: RolloutWorkflow,
        engine: InferenceEngine,
        first_step: int,
    ) -> RolloutScheduler:
        stream = build_task_stream(self.config, self._train_rows)
        recall_outcomes(stream, folder, first_step)
        waiting = read_unused(folder, first_step)
        if waiting:
            self.observer.on_message(f"{len(waiting)} finished trajectories are used, not repeated")

        rollout = self.config.rollout
        planner = StepPlanner(
            stream,
            n_samples=self.config.gconfig.n_samples,
            max_staleness=rollout.max_staleness,
            max_trajectory_age=rollout.max_trajectory_age,
            first_step=first_step,
            last_step=self.config.train.total_steps,
            already_finished=waiting,
            max_failed_groups=rollout.max_failed_groups,
            open_rounds=read_open_rounds(folder, rollout, first_step),
        )
        return RolloutScheduler(
            workflow,
            engine,
            planner,
            max_concurrent=rollout.max_concurrent,
            min_concurrent=rollout.min_concurrent,
            max_retries=rollout.count_retries(),
            on_finished=folder.add_pending,
            observer=self.observer,
        )

    def _entered(self) -> RunFolder:
        if self._folder is None:
            raise RuntimeError("PPOTrainer is a context manager: with PPOTrainer(...) as trainer:")
        return self._folder


def take_rows(given: Sequence[Row] | None, config: DatasetConfig | None, key: str) -> list[Row]:
    """The rows that were given, else those of the configuration.

    Raises:
        DatasetError: there are none, or they cannot be read.
    """
    if given is None:
        if config is None:
            raise ConfigError(f"{key}: this key is required here and was not given")
        return load_rows(config, key)
    rows = [dict(row) for row in given]
    if not rows:
        raise DatasetError(f"{key}: the rows that were given are none: give at least one")
    return rows


def evaluate_rows(
    config: ExperimentConfig,
    rows: Sequence[Row],
    workflow: RolloutWorkflow,
    engine: InferenceEngine,
    background: BackgroundLoop,
    folder: RunFolder,
    observer: Observer,
    *,
    step: int = 0,
    label: str | None = None,
) -> EvalReport:
    """Evaluates the engine's model on the rows; it is stored under ``step`` and ``label``.

    Raises:
        RunError: the evaluation could not be finished.
    """
    n_samples = config.resolve_eval_gconfig().n_samples
    return background.run(
        evaluate(
            folder,
            workflow,
            engine,
            build_eval_tasks(rows, eval_name(step, label)),
            n_samples=n_samples,
            rollout=config.rollout,
            observer=observer,
            step=step,
            label=label,
        ),
        config.rollout.compute_deadline(len(rows) * n_samples),
    )


def train_beside(
    config: ExperimentConfig, run: ResolvedRun, rendezvous: Rendezvous, location: str
) -> None:
    """Trains as a rank beside rank 0, whose :class:`PPOTrainer` has the rollouts; from the
    checkpoints of the run folder at ``location``.

    Raises:
        NotFiniteError: on every rank, as from :meth:`PPOTrainer.train`.
        RankLostError: another rank has ended, or has not come to an exchange in time.
        RunFolderError: the checkpoints that rank 0 writes cannot be read here.
    """
    from agentrl_cli.train.checkpoint import seed_generators
    from agentrl_cli.train.loop import TrainingLoop
    from agentrl_cli.train.ranks import open_ranks

    source = EngineSource(config, run, SilentObserver())
    seed_generators(config.seed)
    with ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(rendezvous, on_gpu=run.trains_on_gpu))
        # Rank 0 decides when they end; who loses it ends too.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if not (is_url(location) or Path(location).is_dir()):
            raise RunFolderError(
                f"output_dir: rank 0 has made the run folder {Path(location).absolute()}, and "
                f"{socket.gethostname()} does not see it. Every rank reads checkpoints there: set "
                "output_dir to a folder on a file system that all nodes share, or to the URL of "
                "object storage"
            )
        folder = stack.enter_context(RunFolder(open_location(location)))
        learner = load_learner(
            *(config, run, source.model_folder, source.tokenizer), ranks=ranks, folder=folder
        )
        TrainingLoop(config=config, learner=learner, ranks=ranks, coordinator=None).run()


def load_trainer_config(spec: TrainerSpec) -> ExperimentConfig:
    """The configuration of the run that a trainer process belongs to."""
    return RunFolder(open_location(spec.owner.location)).load_config(spec.secrets)


def open_workflows(
    config: ExperimentConfig,
    source: CompletionSource,
    observer: Observer,
    stack: ExitStack,
    splits: Sequence[str],
) -> list[RolloutWorkflow]:
    """The workflows that make trajectories for training and for evaluations.

    ``stack`` closes them. Where rollout workers build them again, these only know what they need of
    the rows.

    Raises:
        UserInputError: an agent or a reward cannot be used.
    """
    tokenizer = source.tokenizer if config.workflow_path is not None else None
    external = None
    if config.rollout.agent_mode == "external":
        external = ExternalListener(config.rollout, observer.on_message)
    # Workers have processes of their own for agents and rewards.
    local = stack.enter_context(ExitStack())
    workers = local.enter_context(open_workers(config))
    workflows = build_workflows(
        config,
        tokenizer,
        splits,
        open_client=source.open_client,
        workers=workers,
        external=external,
    )
    for workflow in workflows:
        local.callback(workflow.close)
    if not isinstance(source, EngineSource) or not source.run.num_rollout_workers:
        return workflows
    local.close()
    random_key = external.random_key if external is not None else None
    source.workers = RolloutWorkers(
        config, source.run.num_rollout_workers, splits, observer, random_key
    )
    return [
        RemoteWorkflow(source.workers, split, workflow)
        for split, workflow in zip(splits, workflows, strict=True)
    ]


def check_input(trainer: PPOTrainer) -> None:
    """Builds and loads what can be wrong with the input, and keeps nothing of it but the model's
    folder.

    Raises:
        UserInputError: something is.
    """
    with ExitStack() as stack:
        _build_both_workflows(trainer, stack)
    trainer.source.prepare()


def run_trainer(trainer: PPOTrainer) -> bool:
    """True when the last step is done, False when asked to stop before it.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    with ExitStack() as stack:
        workflows = _build_both_workflows(trainer, stack)
        stack.enter_context(trainer)
        return trainer.train(*workflows)


def _build_both_workflows(trainer: PPOTrainer, stack: ExitStack) -> list[RolloutWorkflow]:
    workflows = open_workflows(
        trainer.config, trainer.source, trainer.observer, stack, ("train", "eval")
    )
    trainer.check_rows(*workflows)
    return workflows
