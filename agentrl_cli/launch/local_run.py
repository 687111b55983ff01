"""Runs on this machine, as the command line starts them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.resolved_run import ResolvedRun
from agentrl_cli.engine.weights.weight_folders import remove_folders_of_dead_runs
from agentrl_cli.errors import StoppedError
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.launch.completion_sources import CompletionSource
from agentrl_cli.launch.plan import build_plan
from agentrl_cli.launch.processes.trainer_group import TrainerGroup, TrainerSupervisor
from agentrl_cli.launch.trainer import (
    PPOTrainer,
    build_workflows,
    check_input,
    evaluate_rows,
    run_trainer,
    take_rows,
)
from agentrl_cli.log import Observer, file_log
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.secret_masking import find_secrets
from agentrl_cli.store.run_folder import RunFolder, run_dir_of
from agentrl_cli.train.loop import StopFlag


def run_training(
    config: ExperimentConfig,
    run: ResolvedRun,
    *,
    observer: Observer,
    overwrite: bool,
    stop: StopFlag,
) -> bool | None:
    """Trains as the configuration says, on what it comes to on this machine.

    Returns:
        True when the last step is done, False when asked to stop before it; None when that was
        before there was a run folder.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    trainer = PPOTrainer(config, run=run, observer=observer, stop=stop, overwrite=overwrite)
    try:
        if run.is_one_process:
            return run_trainer(trainer)
        return _supervise(trainer, overwrite=overwrite, stop=stop)
    except StoppedError:
        return None


def _supervise(checked: PPOTrainer, *, overwrite: bool, stop: StopFlag) -> bool:
    """Trains in processes of their own, beside engine servers.

    ``checked`` looks at the input first, so that nothing is started or deleted for a mistake in it.
    """
    config, observer, source = checked.config, checked.observer, checked.source
    observer.on_stage("check")
    check_input(checked)
    plan = build_plan(config, source.run, run_dir=str(run_dir_of(config)))
    planned = [process for process in plan if process.role == "trainer"]
    with ExitStack() as stack:
        folder = stack.enter_context(
            RunFolder.create_or_resume(config, overwrite=overwrite, versions=source.run.versions)
        )
        stack.enter_context(file_log(folder.log_path("command")))
        # A trainer that was killed could not delete its weights, which may lie in RAM.
        stack.callback(remove_folders_of_dead_runs, config.engine.weight_transfer.dir)
        if checked.report_if_complete(folder):
            return True
        start = partial(
            TrainerGroup,
            planned,
            folder.log_dir(),
            source.start_servers(folder.log_dir(), stack),
            secrets=find_secrets(config.model_dump(mode="json")),
            observer=observer,
        )
        return TrainerSupervisor(
            config=config,
            start_trainer=start,
            check_servers=source.check,
            observer=observer,
            stop=stop,
        ).run()


def run_evaluation(
    config: ExperimentConfig, source: CompletionSource, *, limit: int | None, observer: Observer
) -> EvalReport:
    """Evaluates a model on the validation rows (the training rows where there are none).

    Raises:
        UserInputError: something in the input is wrong; nothing was started.
        RunError: the evaluation could not be finished.
    """
    key = "valid_dataset" if config.valid_dataset is not None else "train_dataset"
    rows = take_rows(None, config.valid_dataset or config.train_dataset, key)[:limit]
    with ExitStack() as stack:
        [workflow] = build_workflows(config, source, observer, stack, ["eval"])
        workflow.check_rows(rows, key)
        source.prepare()
        folder = RunFolder.for_evaluation(config)
        stack.enter_context(file_log(folder.log_path("eval")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        workflow.log_to(folder.log_dir("eval"))
        engine = source.open_engine(folder.log_dir("eval"), background, stack)
        return evaluate_rows(
            config, rows, workflow, engine, background, folder, observer, label=source.label
        )
