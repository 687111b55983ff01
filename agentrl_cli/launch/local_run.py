"""Runs on this machine, as the command line starts them."""

from __future__ import annotations

import importlib.util
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.config.import_paths import import_object
from agentrl_cli.config.resolved_run import Machine, ResolvedRun, resolve_run
from agentrl_cli.errors import MissingExtraError, StoppedError
from agentrl_cli.evaluate.eval_report import EvalReport
from agentrl_cli.launch.completion_sources import CompletionSource, EngineSource
from agentrl_cli.launch.placement import LocalPlacement, Placement
from agentrl_cli.launch.plan import build_plan
from agentrl_cli.launch.processes.trainer_group import TrainerGroup, TrainerSupervisor
from agentrl_cli.launch.run_models import find_unseen_models
from agentrl_cli.launch.run_resolution import check_supported, with_server_package
from agentrl_cli.launch.torchrun import TorchrunRank, place_rank
from agentrl_cli.launch.trainer import (
    PPOTrainer,
    check_input,
    evaluate_rows,
    open_workflows,
    run_trainer,
    take_rows,
)
from agentrl_cli.log import Observer, SilentObserver, file_log
from agentrl_cli.rollout.background_loop import BackgroundLoop
from agentrl_cli.rollout.dataset import is_on_hub, load_rows
from agentrl_cli.scratch_folders import remove_leftovers
from agentrl_cli.secret_masking import find_secrets
from agentrl_cli.store.layout import parse_label
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.gateway_socket import raise_file_limit
from agentrl_cli.train.monitor.loggers.logger_building import check_loggers

if TYPE_CHECKING:
    from agentrl_cli.train.loop import StopFlag


def place_run(
    config: ExperimentConfig, stack: ExitStack, rank: TorchrunRank | None = None
) -> tuple[ResolvedRun, Placement]:
    """What a training run comes to where ``launcher.kind`` places it; nothing is started.

    ``rank`` says which of torchrun's processes this one is.

    Raises:
        UserInputError: the machine, or the cluster, cannot be used for it.
    """
    if rank is not None or config.launcher.kind == "torchrun":
        run, rendezvous = place_rank(config, rank)
        return run, LocalPlacement(rendezvous)
    if config.launcher.kind == "local":
        return resolve_run(config, Machine.detect(), purpose="train"), LocalPlacement()
    _check_ray()
    from agentrl_cli.launch.ray.ray_placement import open_cluster

    machine, placement = open_cluster(config, stack)
    return resolve_run(config, machine, purpose="train"), placement


def find_dashboard(config: ExperimentConfig) -> str | None:
    """The URL at which a cluster is asked to run the command, which this machine does not belong
    to; None: the configuration names none. See :func:`~agentrl_cli.launch.ray.job.run_as_job`.

    Raises:
        MissingExtraError: Ray is not installed.
    """
    address = config.launcher.address or os.environ.get("RAY_ADDRESS", "")
    if config.launcher.kind != "ray" or not address.startswith(("http://", "https://")):
        return None
    _check_ray()
    return address


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(
            "launcher.kind: ray needs Ray, which is not installed. Type "
            "uv pip install 'agentrl-cli[ray]' (on every node of the cluster), or "
            "launcher.kind=local"
        )


def run_training(
    config: ExperimentConfig,
    run: ResolvedRun,
    placement: Placement,
    *,
    observer: Observer,
    overwrite: bool,
    stop: StopFlag,
) -> bool | None:
    """Trains as the configuration says, on what it comes to on this machine or on a cluster.

    Returns:
        True when the last step is done, False when asked to stop before it; None when that was
        before there was a run folder.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    check_supported(config, run)
    raise_file_limit(config.rollout.count_parallel())
    remove_leftovers()
    if run.dtype_advice is not None:
        observer.on_message(run.dtype_advice)
    trainer = PPOTrainer(
        config,
        run=run,
        observer=observer,
        stop=stop,
        overwrite=overwrite,
        rendezvous=placement.rendezvous,
        placement=placement,
    )
    try:
        if run.is_one_process or run.by_torchrun:
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
    plan = build_plan(config, source.run)
    planned = [process for process in plan if process.role == "trainer"]
    with ExitStack() as stack:
        folder = stack.enter_context(
            RunFolder.create_or_resume(config, overwrite=overwrite, versions=source.run.versions)
        )
        stack.enter_context(file_log(folder.log_path("command")))
        # A trainer that was killed could not delete its weights, which may lie in RAM.
        given = config.engine.weight_transfer.dir
        stack.callback(remove_leftovers, [] if given is None else [Path(given).expanduser()])
        if checked.report_if_complete(folder):
            return True
        checked.placement.reserve(config, source.run, observer, stack)
        start = partial(
            TrainerGroup,
            planned,
            folder.log_dir(),
            source.start_servers(folder.log_dir(), stack),
            owner=lambda: checked.placement.name_owner(folder),
            secrets=find_secrets(config.model_dump(mode="json")),
            observer=observer,
            placement=checked.placement,
        )
        return TrainerSupervisor(
            config=config,
            start_trainer=start,
            check_servers=source.check,
            observer=observer,
            stop=stop,
        ).run()


def try_input(config: ExperimentConfig, run: ResolvedRun, *, overwrite: bool) -> list[str]:
    """Imports, builds and loads what the configuration names, as a start does, but starts nothing.

    Returns:
        What was not looked at, since it would have to be fetched or made first.

    Raises:
        UserInputError: something cannot be used.
    """
    RunFolder.check_resumable(config, overwrite=overwrite)
    check_loggers(config)
    rows, unseen = {}, {}
    datasets = {"train_dataset": config.train_dataset, "valid_dataset": config.valid_dataset}
    for key, dataset in datasets.items():
        if dataset is not None and is_on_hub(dataset):
            unseen[f"{key}.path"] = dataset.path
        elif dataset is not None:
            rows[key] = load_rows(dataset, key)
    unseen |= find_unseen_models(config)
    observer = SilentObserver()
    source = EngineSource(config, run, observer)
    has_tokenizer = not unseen.keys() & {"model.path", "tokenizer_path"}
    with ExitStack() as stack:
        if has_tokenizer or config.workflow_path is None:
            workflows = open_workflows(config, source, observer, stack, ("train", "eval"))
            for workflow, key in zip(workflows, ("train_dataset", "valid_dataset"), strict=True):
                if key in rows:
                    workflow.check_rows(rows[key], key)
        else:
            # It would be built with the tokenizer.
            import_object(config.workflow_path, "workflow_path")
            if config.reward_fn_path is not None:
                import_object(config.reward_fn_path, "reward_fn_path")
    if has_tokenizer:
        source.prepare()
    else:
        with_server_package(run, config)
    return [f"{key}: {path}, which is not on this machine yet" for key, path in unseen.items()]


def run_evaluation(
    config: ExperimentConfig,
    source: CompletionSource,
    *,
    limit: int | None,
    observer: Observer,
    name: str | None = None,
) -> tuple[str, EvalReport]:
    """Evaluates a model on the validation rows (the training rows where there are none).

    Returns:
        The name under which the evaluation is stored, and its report. The name is ``name``, or
        else says which model it was; no other evaluation has it.

    Raises:
        UserInputError: something in the input is wrong; nothing was started.
        RunError: the evaluation could not be finished.
    """
    key, dataset = config.resolve_eval_dataset()
    if key == "train_dataset":
        observer.on_message(
            "no valid_dataset is set: this measures on the rows of train_dataset, which a trained "
            "model has learned from. Type valid_dataset.path=FILE to measure on others"
        )
    rows = take_rows(None, dataset, key)[:limit]
    with ExitStack() as stack:
        [workflow] = open_workflows(config, source, observer, stack, ["eval"])
        workflow.check_rows(rows, key)
        source.prepare()
        folder = stack.enter_context(RunFolder.for_evaluation(config))
        label = folder.claim_eval(0, parse_label(name or "") or source.label)
        stack.enter_context(file_log(folder.log_path("eval")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        workflow.log_to(folder.log_dir("eval"))
        if isinstance(source, EngineSource):
            if source.run.dtype_advice is not None:
                observer.on_message(source.run.dtype_advice)
            source.start_workers(folder.log_dir("eval"), background, stack)
        engine = source.open_engine(folder.log_dir("eval"), background, stack)
        report = evaluate_rows(
            *(config, rows, workflow, engine, background, folder, observer), label=label
        )
    return label, report
