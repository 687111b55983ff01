"""Runs on this machine, as the command line starts them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.weight_transfer_folder import remove_folders_of_dead_runs
from agentrl_cli.errors import StoppedError
from agentrl_cli.evaluate.report import EvalReport
from agentrl_cli.evaluate.run import evaluate_and_store
from agentrl_cli.launch.child_trainer import ChildTrainer
from agentrl_cli.launch.fleet import (
    NoServers,
    StartingFleet,
    find_server_versions,
    needs_servers,
    open_fleet,
)
from agentrl_cli.launch.handover import RunningServers
from agentrl_cli.launch.machine import Machine
from agentrl_cli.launch.plan import build_plan, count_embedded_trainers
from agentrl_cli.launch.ranked_trainer import RankedTrainer
from agentrl_cli.launch.sources import CompletionSource, EndpointSource, EngineSource
from agentrl_cli.launch.supervisor import Supervisor
from agentrl_cli.launch.trainer import PPOTrainer, take_rows
from agentrl_cli.launch.training import check_input, run_trainer
from agentrl_cli.log import Observer, file_log
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.rollout.building import build_workflow, open_external_access, open_workers
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.store.run_folder import RunFolder, run_dir_of
from agentrl_cli.store.secrets import find_secrets
from agentrl_cli.train.stop_flag import StopFlag


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a training run left behind."""

    run_dir: Path
    is_complete: bool
    """False: it was asked to stop before its last step."""
    is_begun: bool = True
    """False: before there was a run folder, even."""


def run_training(
    config: ExperimentConfig, *, observer: Observer, overwrite: bool, stop: StopFlag
) -> RunResult:
    """Trains as the configuration says.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    trainer = PPOTrainer(config, observer=observer, stop=stop, overwrite=overwrite)
    machine = Machine.detect()
    try:
        if needs_servers(config, machine.num_gpus) or count_embedded_trainers(config, machine) > 1:
            is_complete = _supervise(trainer, machine, overwrite=overwrite, stop=stop)
        else:
            is_complete = run_trainer(trainer)
    except StoppedError:
        return RunResult(run_dir_of(config), is_complete=False, is_begun=False)
    return RunResult(run_dir_of(config), is_complete)


def _supervise(checked: PPOTrainer, machine: Machine, *, overwrite: bool, stop: StopFlag) -> bool:
    """Trains in a process of its own, beside engine servers.

    Args:
        checked: looks at the input, so that nothing is started or deleted for a mistake in it.
        machine: what processes are placed on.
        overwrite: discards what an earlier run left in the folder.
        stop: asks the run to end.
    """
    config, observer = checked.config, checked.observer
    versions = find_server_versions(config, num_gpus=machine.num_gpus)
    observer.on_stage("check")
    check_input(checked)
    plan = build_plan(config, machine, run_dir=str(run_dir_of(config)))
    planned = [process for process in plan if process.role == "trainer"]
    with ExitStack() as stack:
        folder = stack.enter_context(
            RunFolder.create_or_resume(config, overwrite=overwrite, versions=versions)
        )
        stack.enter_context(file_log(folder.log_path("command")))
        # A trainer that was killed could not delete its weights, which may lie in RAM.
        stack.callback(remove_folders_of_dead_runs, config.engine.weight_transfer.dir)
        if checked.tell_if_complete(folder):
            return True
        servers: StartingFleet | NoServers = NoServers()
        if needs_servers(config, machine.num_gpus):
            servers = stack.enter_context(
                open_fleet(
                    config,
                    checked.model_folder,
                    purpose="train",
                    num_gpus=machine.num_gpus,
                    log_dir=folder.log_dir(),
                    observer=observer,
                )
            )
        more: dict[str, Any] = {
            "secrets": find_secrets(config.model_dump(mode="json")),
            "observer": observer,
        }
        start: Callable[[RunningServers | None], ChildTrainer]
        if len(planned) == 1:
            start = partial(ChildTrainer, planned[0], folder.log_path("trainer"), **more)
        else:
            start = partial(RankedTrainer, planned, folder.log_dir(), **more)
        supervisor = Supervisor(
            config=config, servers=servers, start_trainer=start, observer=observer, stop=stop
        )
        return supervisor.run()


def run_evaluation(
    config: ExperimentConfig,
    *,
    checkpoint: Path | None,
    limit: int | None,
    base_url: str | None,
    model_name: str | None,
    observer: Observer,
) -> EvalReport:
    """Evaluates a model on the validation rows (the training rows where there are none).

    Args:
        config: the experiment.
        checkpoint: a checkpoint's folder, instead of ``config.model.path``.
        limit: the first rows only.
        base_url: an OpenAI-compatible endpoint that answers instead of an engine.
        model_name: the endpoint's model.
        observer: shows the evaluation to a person.

    Raises:
        UserInputError: something in the input is wrong; nothing was started.
        RunError: the evaluation could not be finished.
    """
    key = "valid_dataset" if config.valid_dataset is not None else "train_dataset"
    rows = take_rows(None, config.valid_dataset or config.train_dataset, key)[:limit]
    source, label = _choose_source(config, checkpoint, base_url, model_name, observer)
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
                label=label,
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


def _choose_source(
    config: ExperimentConfig,
    checkpoint: Path | None,
    base_url: str | None,
    model_name: str | None,
    observer: Observer,
) -> tuple[CompletionSource, str]:
    """What answers the agent's calls, and a label for its results."""
    if base_url is not None:
        label = f"endpoint-{_as_file_name(model_name or '')}"
        return EndpointSource(config, base_url, model_name or ""), label
    label = f"checkpoint-{_as_file_name(checkpoint.name)}" if checkpoint is not None else "model"
    return EngineSource(config, str(checkpoint or config.model.path), observer), label


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")
