"""Runs on this machine, as the command line starts them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.weights.weight_folders import remove_folders_of_dead_runs
from agentrl_cli.errors import StoppedError
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.evaluate.eval_run import evaluate_and_store
from agentrl_cli.launch.completion_sources import CompletionSource
from agentrl_cli.launch.plan import build_plan
from agentrl_cli.launch.processes.trainer_group import TrainerGroup, TrainerSupervisor
from agentrl_cli.launch.processes.trainer_protocol import RunningServers
from agentrl_cli.launch.run_resolution import with_output_head, with_server_package
from agentrl_cli.launch.servers.server_group import ServerGroup
from agentrl_cli.launch.trainer import PPOTrainer, check_input, run_trainer, take_rows
from agentrl_cli.log import Observer, file_log
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.rollout.workflow_building import build_workflow, open_external_access, open_workers
from agentrl_cli.store.config_secrets import find_secrets
from agentrl_cli.store.run_folder import RunFolder, run_dir_of
from agentrl_cli.train.loop import StopFlag


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a training run left behind."""

    run_dir: Path
    is_complete: bool
    """False: it was asked to stop before its last step."""
    is_begun: bool = True
    """False: before there was a run folder, even."""


def run_training(
    config: ExperimentConfig,
    run: ResolvedRun,
    *,
    observer: Observer,
    overwrite: bool,
    stop: StopFlag,
) -> RunResult:
    """Trains as the configuration says, on what it comes to on this machine.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    trainer = PPOTrainer(config, run=run, observer=observer, stop=stop, overwrite=overwrite)
    try:
        if run.is_one_process:
            is_complete = run_trainer(trainer)
        else:
            is_complete = _supervise(trainer, run, overwrite=overwrite, stop=stop)
    except StoppedError:
        return RunResult(run_dir_of(config), is_complete=False, is_begun=False)
    return RunResult(run_dir_of(config), is_complete)


def _supervise(checked: PPOTrainer, run: ResolvedRun, *, overwrite: bool, stop: StopFlag) -> bool:
    """Trains in a process of its own, beside engine servers.

    Args:
        checked: looks at the input, so that nothing is started or deleted for a mistake in it.
        run: the engine, the devices and the packages.
        overwrite: discards what an earlier run left in the folder.
        stop: asks the run to end.
    """
    config, observer = checked.config, checked.observer
    run = with_server_package(run, config)
    observer.on_stage("check")
    check_input(checked)
    plan = build_plan(config, run, run_dir=str(run_dir_of(config)))
    planned = [process for process in plan if process.role == "trainer"]
    with ExitStack() as stack:
        folder = stack.enter_context(
            RunFolder.create_or_resume(config, overwrite=overwrite, versions=run.versions)
        )
        stack.enter_context(file_log(folder.log_path("command")))
        # A trainer that was killed could not delete its weights, which may lie in RAM.
        stack.callback(remove_folders_of_dead_runs, config.engine.weight_transfer.dir)
        if checked.report_if_complete(folder):
            return True
        servers, check_servers = RunningServers(run=run), lambda: None
        if run.servers:
            run = with_output_head(run, config, checked.model_folder)
            group = ServerGroup(
                config, run, checked.model_folder, log_dir=folder.log_dir(), observer=observer
            )
            servers, check_servers = stack.enter_context(group).servers, group.check
        start = partial(
            TrainerGroup,
            planned,
            folder.log_dir(),
            servers,
            secrets=find_secrets(config.model_dump(mode="json")),
            observer=observer,
        )
        return TrainerSupervisor(
            config=config,
            start_trainer=start,
            check_servers=check_servers,
            observer=observer,
            stop=stop,
        ).run()


def run_evaluation(
    config: ExperimentConfig, source: CompletionSource, *, limit: int | None, observer: Observer
) -> EvalReport:
    """Evaluates a model on the validation rows (the training rows where there are none).

    Args:
        config: the experiment.
        source: answers the agent's calls.
        limit: the first rows only.
        observer: shows the evaluation to a person.

    Raises:
        UserInputError: something in the input is wrong; nothing was started.
        RunError: the evaluation could not be finished.
    """
    key = "valid_dataset" if config.valid_dataset is not None else "train_dataset"
    rows = take_rows(None, config.valid_dataset or config.train_dataset, key)[:limit]
    gconfig = config.resolve_eval_gconfig()
    with ExitStack() as stack:
        workflow = _build_eval_workflow(config, source, observer, stack)
        stack.callback(workflow.close)
        workflow.check_rows(rows, key)
        source.prepare()
        folder = RunFolder.for_evaluation(config)
        stack.enter_context(file_log(folder.log_path("eval")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        workflow.log_to(folder.log_dir("eval"))
        engine = source.start(background, folder.log_dir("eval"), stack)
        return background.run(
            evaluate_and_store(
                folder,
                workflow,
                engine,
                build_eval_tasks(rows),
                n_samples=gconfig.n_samples,
                max_concurrent=config.rollout.max_concurrent,
                observer=observer,
                label=source.label,
            ),
            config.rollout.compute_deadline(len(rows) * gconfig.n_samples),
        )


def _build_eval_workflow(
    config: ExperimentConfig, source: CompletionSource, observer: Observer, stack: ExitStack
) -> RolloutWorkflow:
    external = None
    if config.rollout.agent_mode == "external":
        external = open_external_access(config, observer.on_message, waits="limited")
    return build_workflow(
        config,
        source.tokenizer if config.workflow_path is not None else None,
        gconfig=config.resolve_eval_gconfig(),
        open_client=source.open_client,
        seed=config.seed,
        workers=stack.enter_context(open_workers(config)),
        external=external,
        split="eval",
    )
