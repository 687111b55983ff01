"""One training run with the configuration's own agent, in this process."""

from __future__ import annotations

from contextlib import ExitStack

from agentrl_cli.engine.protocol import InferenceEngine, Sampling
from agentrl_cli.launch.trainer import PPOTrainer
from agentrl_cli.rollout.building import build_workflow, open_external_access, open_workers
from agentrl_cli.rollout.workflow import RolloutWorkflow
from agentrl_cli.tracking.client import TrackingClient
from agentrl_cli.tracking.session import Budget


def build_workflows(trainer: PPOTrainer, stack: ExitStack) -> list[RolloutWorkflow]:
    """The workflows that make trajectories for training and for evaluations, checked.

    ``stack`` closes them.

    Raises:
        UserInputError: an agent, a reward or a dataset cannot be used.
    """
    config = trainer.config

    def open_client(engine: InferenceEngine, sampling: Sampling, budget: Budget) -> TrackingClient:
        return TrackingClient(
            engine=engine,
            tokenizer=trainer.tokenizer,
            sampling=sampling,
            budget=budget,
            **config.engine.list_reading_options(),
        )

    tokenizer = trainer.tokenizer if config.workflow_path is not None else None
    workers = stack.enter_context(open_workers(config))
    external = None
    if config.rollout.agent_mode == "external":
        external = open_external_access(config, trainer.observer.on_message, waits="limited")
    workflows: list[RolloutWorkflow] = []
    purposes = (("train", config.gconfig), ("eval", config.resolve_eval_gconfig()))
    for split, gconfig in purposes:
        workflow = build_workflow(
            config,
            tokenizer,
            gconfig=gconfig,
            open_client=open_client,
            seed=config.seed,
            workers=workers,
            external=external,
            split=split,
        )
        stack.callback(workflow.close)
        workflows.append(workflow)
    trainer.check_rows(*workflows)
    return workflows


def check_input(trainer: PPOTrainer) -> None:
    """Builds and loads what can be wrong with the input, and keeps nothing of it but the model's
    folder.

    Raises:
        UserInputError: something is.
    """
    with ExitStack() as stack:
        build_workflows(trainer, stack)
        _ = trainer.tokenizer


def run_trainer(trainer: PPOTrainer) -> bool:
    """True when the last step is done, False when asked to stop before it.

    Raises:
        UserInputError: something in the input is wrong; nothing was started or written.
        RunError: the run could not go on; what was done is stored.
    """
    with ExitStack() as stack:
        workflows = build_workflows(trainer, stack)
        stack.enter_context(trainer)
        return trainer.train(*workflows)
