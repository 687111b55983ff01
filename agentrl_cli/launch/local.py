"""Runs on this machine, as the command line starts them."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agentrl_cli.config.experiment import ExperimentConfig
from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.evaluate.report import EvalReport
from agentrl_cli.evaluate.run import evaluate_and_store
from agentrl_cli.launch.sources import CompletionSource, EndpointSource, EngineSource
from agentrl_cli.launch.trainer import PPOTrainer, take_rows
from agentrl_cli.log import Observer, file_log
from agentrl_cli.rollout.background import BackgroundLoop
from agentrl_cli.rollout.building import build_workflow
from agentrl_cli.rollout.dataset import build_eval_tasks
from agentrl_cli.store.run_folder import RunFolder
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.session import Budget
from agentrl_cli.train.loop import StopFlag

_CLOSE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a training run left behind."""

    run_dir: Path
    is_complete: bool
    """False: it was asked to stop before its last step."""


def run_training(
    config: ExperimentConfig, *, observer: Observer, overwrite: bool, stop: StopFlag
) -> RunResult:
    """Trains as the configuration says.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    trainer = PPOTrainer(config, observer=observer, stop=stop, overwrite=overwrite)

    def open_client(engine: InferenceEngine, sampling: Sampling, budget: Budget) -> TrackingClient:
        return TrackingClient(
            engine=engine,
            tokenizer=trainer.tokenizer,
            tool_call_parser=config.engine.tool_call_parser,
            sampling=sampling,
            budget=budget,
        )

    with ExitStack() as stack:
        tokenizer = trainer.tokenizer if config.workflow_path is not None else None
        workflows = []
        for gconfig in (config.gconfig, config.resolve_eval_gconfig()):
            workflow = build_workflow(
                config, tokenizer, gconfig=gconfig, open_client=open_client, seed=config.seed
            )
            stack.callback(workflow.close)
            workflows.append(workflow)
        trainer.check_rows(*workflows)
        stack.enter_context(trainer)
        is_complete = trainer.train(*workflows)
        return RunResult(trainer.run_dir, is_complete)


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
        workflow = build_workflow(
            config,
            source.tokenizer if config.workflow_path is not None else None,
            gconfig=gconfig,
            open_client=source.open_client,
            seed=config.seed,
        )
        stack.callback(workflow.close)
        workflow.check_rows(rows, key)
        source.prepare()
        folder = RunFolder.for_evaluation(config)
        stack.enter_context(file_log(folder.log_path("eval")))
        background = stack.enter_context(BackgroundLoop())
        observer.on_stage("load model")
        engine = source.start()
        stack.callback(lambda: background.run(source.close(), _CLOSE_SECONDS))
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
